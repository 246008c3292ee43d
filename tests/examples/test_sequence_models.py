"""DIN, DIEN and YoutubeDNN compute what their papers say, and padding changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from gba_hvd_tools import cli as command
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from ctr.build import build_model, build_tables, features, loss_of, refuse_single_sample
from ctr.config import Behaviour, Data, JobConfig, load
from ctr.datasets import open_splits
from ctr.dien import AUGRU, DIEN, auxiliary_loss, masked_softmax
from ctr.din import DIN, ActivationUnit, Dice
from ctr.sequences import SequenceLog
from ctr.youtube_dnn import YoutubeDNN
from gba_hvd import SGD, EmbeddingTables, Feature, Table
from gba_hvd.batch import Bag, Batch
from gba_hvd.data import ClickLog, SyntheticBehaviourLog
from gba_hvd.errors import BadInput
from train_ctr import main

CONFIGS = Path(__file__).resolve().parents[2] / "examples" / "configs"
DIM, B = 4, 9
LOG: dict[str, Any] = {"n_users": 30, "n_items": 40, "n_categories": 8, "max_length": 7}
POOLED = ("history", "history_category")


class PlainTables(EmbeddingTables):
    """`nn.functional.embedding` of rows in this process alone, with row 0 of items and categories as padding."""

    def __init__(self, pooling: str | None = None) -> None:
        rows = SyntheticBehaviourLog(1, **LOG).tables
        super().__init__(
            {name: Table(n, DIM, padding_idx=None if name == "user" else 0) for name, n in rows.items()},
            optimizer=SGD(lr=0.1),
            features={
                "user": "user", "candidate": "item", "candidate_category": "category",
                **{name: Feature("item", pooling) for name in ("history", "negative")},
                **{f"{name}_category": Feature("category", pooling) for name in ("history", "negative")},
            },
        )  # fmt: skip
        generator = torch.Generator().manual_seed(1)
        self.weights = {n: torch.randn(rows[n], DIM, generator=generator).requires_grad_() for n in rows}

    def forward(self, ids: Mapping[str, Tensor | Bag]) -> dict[str, Tensor]:
        found = {}
        for name, some in ids.items():
            feature = self.features[name]
            assert isinstance(some, Tensor)
            rows = self.weights[feature.table][some]
            if feature.table != "user":
                rows = rows * (some != 0).unsqueeze(-1)
            if feature.pooling == "mean":
                rows = rows.sum(1) / (some != 0).sum(1, keepdim=True)
            found[name] = rows
        return found


def a_batch(n: int = B, **more: Any) -> Batch:
    return SyntheticBehaviourLog(n, **LOG, **more).take(np.arange(n))


def ids_of(batch: Batch, name: str) -> Tensor:
    ids = batch.ids[name]
    assert isinstance(ids, Tensor)
    return ids


def padded(batch: Batch, by: int) -> Batch:
    """The same samples, with more padding behind each history."""
    ids = {name: pad(ids, (0, by)) if ids.ndim == 2 else ids for name in batch.ids for ids in [ids_of(batch, name)]}
    return Batch({**ids}, batch.dense, batch.label)


def shuffled_histories(batch: Batch) -> Batch:
    """The same samples with each history in the opposite order."""
    ids = {name: ids_of(batch, name).clone() for name in batch.ids}
    for row, n in enumerate((ids["history"] != 0).sum(1).tolist()):
        for name in POOLED:
            ids[name][row, :n] = ids[name][row, :n].flip(0)
    return Batch({**ids}, batch.dense, batch.label)


def test_dice_is_prelu_whose_bend_follows_the_statistics() -> None:
    x, dice = torch.randn(50, 3) * 4 + 2, Dice(3)
    nn.init.constant_(dice.alpha, 0.3)
    p = torch.sigmoid((x - x.mean(0)) / (x.var(0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(dice(x), torch.where(p > -1, p * x + (1 - p) * 0.3 * x, x))


def test_the_activation_unit_weighs_each_click_by_itself_and_padding_by_0() -> None:
    unit, history, candidate = ActivationUnit(DIM, (5,), "prelu"), torch.randn(2, 3, DIM), torch.randn(2, DIM)
    clicked = torch.tensor([[True, True, False], [True, False, False]])
    weights = unit(history, candidate, clicked)
    assert weights[~clicked].tolist() == [0, 0, 0]
    for row, at in clicked.nonzero().tolist():
        h, c = history[row, at], candidate[row]
        torch.testing.assert_close(weights[row, at], unit.layers(torch.cat([h, c, h - c, h * c]).unsqueeze(0))[0, 0])


def test_din_sums_the_weighted_clicks_without_normalising() -> None:
    tables, batch = PlainTables(), a_batch()
    model = DIN(tables, hidden=(6,), attention=(5,), activation="prelu")
    seen: list[Tensor] = []
    model.top.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    model(batch)
    rows = tables(batch.ids)
    expected = []
    for row in range(B):
        candidate = torch.cat([rows["candidate"][row], rows["candidate_category"][row]])
        interest = torch.zeros(2 * DIM)
        for at in range(int((ids_of(batch, "history")[row] != 0).sum())):
            click = torch.cat([rows["history"][row, at], rows["history_category"][row, at]])
            pair = torch.cat([click, candidate, click - candidate, click * candidate])
            interest = interest + model.unit.layers(pair.unsqueeze(0))[0, 0] * click
        expected.append(torch.cat([rows["user"][row], interest, candidate, interest * candidate]))
    torch.testing.assert_close(seen[0], torch.stack(expected))


def test_the_order_of_clicks_is_nothing_to_din_and_something_to_dien() -> None:
    batch = a_batch()
    din, dien = DIN(PlainTables(), hidden=(6,)).eval(), DIEN(PlainTables(), hidden=(6,)).eval()
    torch.testing.assert_close(din(shuffled_histories(batch)), din(batch))
    assert not torch.allclose(dien(shuffled_histories(batch)), dien(batch), atol=1e-3)


def test_the_attention_is_a_softmax_over_clicks() -> None:
    scores, mask = torch.randn(3, 4), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    weights = masked_softmax(scores, mask)
    torch.testing.assert_close(weights[0], scores[0].softmax(0))
    torch.testing.assert_close(weights[1, :2], scores[1, :2].softmax(0))
    assert weights[~mask].tolist() == [0] * 6


def test_augru_with_full_attention_is_a_gru_and_without_keeps_its_state() -> None:
    """`nn.GRU` has the opposite sign of the update gate, and a bias of its own for the proposed state."""
    ours, theirs = AUGRU(3, 5), nn.GRU(3, 5, batch_first=True)
    of_input, bias = ours.of_input.weight.detach(), ours.of_input.bias.detach()
    (w_u, w_r, w_h), (b_u, b_r, b_h) = of_input.chunk(3), bias.chunk(3)
    (v_u, v_r, v_h) = ours.of_state.weight.detach().chunk(3)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(torch.cat([w_r, -w_u, w_h]))
        theirs.bias_ih_l0.copy_(torch.cat([b_r, -b_u, b_h]))
        theirs.weight_hh_l0.copy_(torch.cat([v_r, -v_u, v_h]))
        theirs.bias_hh_l0.zero_()
    inputs = torch.randn(2, 6, 3)
    expected = theirs(inputs)[0]
    torch.testing.assert_close(ours(inputs, torch.ones(2, 6)), expected[:, -1])
    stopped = torch.tensor([[1.0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0]])
    torch.testing.assert_close(ours(inputs, stopped), torch.stack([expected[0, 2], expected[1, 4]]))


def test_augru_scales_the_update_gate() -> None:
    ours, inputs = AUGRU(3, 5), torch.randn(1, 1, 3)
    update, _, proposed = ours.of_input(inputs[:, 0]).chunk(3, dim=1)
    torch.testing.assert_close(ours(inputs, torch.tensor([[0.4]])), 0.4 * update.sigmoid() * proposed.tanh())


def test_the_auxiliary_loss_is_a_log_loss_of_the_next_click_and_the_negative() -> None:
    interests, history, negative = (torch.randn(2, 3, DIM) for _ in range(3))
    clicked = torch.tensor([[True, True, True], [True, True, False]])
    pairs = [(0, 0), (0, 1), (1, 0)]  # the clicks that have a next one
    losses = [
        -logsigmoid(interests[i, t] @ history[i, t + 1]) - logsigmoid(-(interests[i, t] @ negative[i, t + 1]))
        for i, t in pairs
    ]
    torch.testing.assert_close(auxiliary_loss(interests, history, negative, clicked), torch.stack(losses).mean())
    assert auxiliary_loss(interests, history, negative, clicked & (torch.arange(3) == 0)) == 0


def test_dien_adds_its_auxiliary_loss_with_its_weight() -> None:
    batch = a_batch(negatives=True)
    losses = []
    for weight in (0.0, 0.5, 1.0):
        torch.manual_seed(3)
        losses.append(DIEN(PlainTables(), hidden=(6,), auxiliary=weight).loss(batch))
    torch.testing.assert_close(losses[1] - losses[0], (losses[2] - losses[0]) / 2)
    assert losses[2] > losses[0] + 0.1


def test_the_two_towers_are_an_mlp_of_the_means_and_the_rows_of_the_item() -> None:
    tables, batch = PlainTables("mean"), a_batch(target="next_item")
    model = YoutubeDNN(tables, torch.zeros(41), hidden=(6,))
    users, items = model(batch)
    means = []
    for name, table in (("history", "item"), ("history_category", "category")):
        ids = ids_of(batch, name)
        means.append(torch.stack([tables.weights[table][row[row != 0]].mean(0) for row in ids]))
    joined = torch.cat([tables.weights["user"][ids_of(batch, "user")], *means], dim=1)
    torch.testing.assert_close(users, model.out(model.user_tower(joined)))
    rows = tables(batch.ids)
    torch.testing.assert_close(items, rows["candidate"] + rows["candidate_category"])
    torch.testing.assert_close(model.users(batch), users)
    torch.testing.assert_close(model.items(batch), items)


def test_the_loss_of_the_two_towers_is_a_softmax_of_corrected_logits_over_the_other_items() -> None:
    batch, log_q = a_batch(12, target="next_item"), torch.randn(41)
    model = YoutubeDNN(PlainTables("mean"), log_q, hidden=(6,), temperature=0.5)
    users, items = model(batch)
    clicked = ids_of(batch, "candidate")
    assert len(clicked.unique()) < len(clicked), "an item is there twice"
    losses = []
    for row in range(12):
        others = [at for at in range(12) if at == row or clicked[at] != clicked[row]]
        logits = users[row] @ items[others].T / 0.5 - log_q[clicked[others]]
        losses.append(-logits.log_softmax(0)[others.index(row)])
    torch.testing.assert_close(model.loss(batch), torch.stack(losses).mean())


@pytest.mark.parametrize("kind", ["din", "din-prelu", "dien", "youtube_dnn"])
def test_padding_changes_neither_outputs_nor_gradients(kind: str) -> None:
    found = []
    for by in (0, 5):
        torch.manual_seed(0)
        tables = PlainTables("mean" if kind == "youtube_dnn" else None)
        batch = padded(a_batch(negatives=kind == "dien", target="next_item" if kind == "youtube_dnn" else "click"), by)
        model: nn.Module
        if kind == "dien":
            model = DIEN(tables, hidden=(6,))
        elif kind == "youtube_dnn":
            model = YoutubeDNN(tables, torch.zeros(41), hidden=(6,))
        else:
            model = DIN(tables, hidden=(6,), activation="prelu" if kind == "din-prelu" else "dice")
        loss = loss_of(model, batch)
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        grads = [weights.grad for weights in tables.weights.values()]
        assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
        found.append([loss, *grads, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["din", "dien", "youtube_dnn"])
def test_the_configuration_makes_the_model_and_features_that_fit(name: str, tmp_path: Path) -> None:
    config: JobConfig = load(CONFIGS / f"{name}.yaml")
    log = config.data.behaviour.log(300, 0)
    tables = build_tables(config, log)
    model = build_model(config, tables, log)
    assert type(model).__name__.lower() == name.replace("_", "")
    assert set(features(config)) == set(log.take(np.arange(2)).ids), "every id of a batch has a feature"
    assert {n: table.padding_idx for n, table in tables.tables.items()} == {"user": None, "item": 0, "category": 0}


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match='activation must be "dice" or "prelu", got \'relu\''):
        DIN(PlainTables(), activation="relu")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        (
            "din",
            "data.preset=frappe",
            r"model\.kind: din reads a history of clicks, .*'frappe'; Frappe and Criteo",
        ),
        ("dien", "data={dir: folder}", r"model\.auxiliary: the auxiliary loss needs an item that was not clicked"),
        ("youtube_dnn", "data={dir: folder}", r"youtube_dnn reads a history of clicks, .* and data\.dir folder"),
        ("din", "data.max_history=7", r"data\.max_history: only din and dien on a prepared store"),
        ("din", "model.kind=deepfm", r"model\.attention: belongs to din, but model\.kind is deepfm"),
        ("dien", "model.kind=dlrm", r"data\.preset: behaviour has a history .* but model\.kind is dlrm"),
        ("dien", "model.kind=youtube_dnn", r"data\.behaviour\.target: youtube_dnn learns next_item, got click"),
        ("youtube_dnn", "data.behaviour.target=click", r"data\.behaviour\.target: youtube_dnn learns next_item"),
        (
            "dien",
            "data.behaviour.negatives=false",
            r"data\.behaviour\.negatives: the auxiliary loss needs them",
        ),
        ("dien", "model.auxiliary=0", r"data\.behaviour\.negatives: nothing reads them, got true"),
        ("din", "data.behaviour.negatives=true", r"data\.behaviour\.negatives: nothing reads them"),
        ("din", "embedding.pooling=sum", r"embedding\.pooling: din has a pooling of its own, got sum"),
        ("din", "model.batch_norm=true", r"model\.batch_norm: din has none"),
        ("din", "model.activation=relu", r"model\.activation: expected one of dice, prelu, got 'relu'"),
        ("din", "model.attention=[]", r"model\.attention: widths must be positive"),
        ("dien", "model.temperature=2.0", r"model\.temperature: belongs to youtube_dnn"),
        ("youtube_dnn", "model.temperature=0", r"model\.temperature: must be positive"),
        ("dien", "model.auxiliary=-1", r"model\.auxiliary: must not be negative"),
        ("din", "data.behaviour.items=999", r"data\.behaviour: n_items 999: expected a multiple of n_categories, 20"),
        ("din", "data.behaviour.test=0", r"data\.behaviour: train, valid and test must be positive"),
    ],
)
def test_settings_that_do_not_fit_each_other_are_refused(name: str, override: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        load(CONFIGS / f"{name}.yaml", [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.dir=folder", r"data\.preset is behaviour, .* but data\.dir is set"),
        (
            "data.min_count=3",
            r"but data\.min_count is set, which has no effect .*'data=\{dir: STORE\}' in place of --data",
        ),
        ("data.synthetic.seed=3", r"data\.synthetic is set"),
    ],
)
def test_settings_of_other_logs_are_refused_beside_the_behaviour_log(override: str, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        open_splits(load(CONFIGS / "din.yaml", [override]).data)


def test_settings_of_the_behaviour_log_are_refused_beside_another_one() -> None:
    with pytest.raises(BadInput, match=r"data\.behaviour has settings, but data\.preset is 'synthetic'"):
        open_splits(Data(preset="synthetic", behaviour=Behaviour(users=7)))


def test_the_splits_are_different_rows_of_one_truth_with_its_best_figure() -> None:
    clicks = open_splits(Data(preset="behaviour", behaviour=Behaviour(train=300, valid=200, test=5000)))
    items = Behaviour(train=300, valid=200, test=2000, target="next_item")
    retrieval = open_splits(Data(preset="behaviour", behaviour=items))
    for splits in (clicks, retrieval):
        assert [splits.description[name]["start"] for name in ("train", "valid", "test")] == [0, 300, 500]
    assert clicks.auc_bayes is not None and 0.8 < clicks.auc_bayes < 0.95 and clicks.recall_bayes is None
    assert retrieval.recall_bayes is not None and 0.5 < retrieval.recall_bayes < 0.7 and retrieval.auc_bayes is None


def test_dice_needs_two_samples_in_the_last_micro_batch() -> None:
    settings = ["data.behaviour.train=257", "train.micro_batch=256"]
    with pytest.raises(BadInput, match=r"the statistics of Dice need 2: .* set model\.activation=prelu"):
        refuse_single_sample(load(CONFIGS / "din.yaml", settings), 257)
    refuse_single_sample(load(CONFIGS / "din.yaml", [*settings, "model.activation=prelu"]), 257)


@pytest.mark.parametrize("name", ["din", "dien", "youtube_dnn"])
def test_a_dry_run_tries_a_batch_and_says_the_plan(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["data.behaviour.train=500", "data.behaviour.test=500", "train.plateau_factor=0.5"]
    assert main(["--config", str(CONFIGS / f"{name}.yaml"), "--dry-run", *settings]) == 0
    shown = capsys.readouterr().out
    assert "synthetic behaviour log: 500 train" in shown
    assert "histories of up to 20 clicks; features user, candidate, candidate_category, history" in shown
    assert ("negative" in shown) == (name == "dien")
    assert re.search(r"batch +128 samples, forward and backward in .* s, loss \d", shown)
    assert f"when validation {'recall@50' if name == 'youtube_dnn' else 'AUC'} stops improving" in shown


# --- a prepared store with histories ---------------------------------------------------------------------------------

SHARED = [
    "--categorical", "user,candidate,candidate_category", "--multi", "history", "--multi", "history_category",
    "--table", "item=history,candidate", "--table", "category=history_category,candidate_category",
]  # fmt: skip


def a_store(folder: Path, more: list[str] = SHARED) -> Path:
    rng, n = np.random.default_rng(4), 400
    categories = np.array([f"kind {i % 4}" for i in range(30)])
    histories = [rng.integers(0, 30, int(k)) for k in rng.integers(0, 7, n)]
    candidate = rng.integers(0, 30, n)
    columns = {
        "label": rng.integers(0, 2, n), "user": rng.integers(0, 20, n), "candidate": candidate,
        "candidate_category": categories[candidate], "history": [one.tolist() for one in histories],
        "history_category": [categories[one].tolist() for one in histories],
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "log.parquet")
    assert command.main(["data", "prepare", str(folder / "log.parquet"), "--out", str(folder / "store"), *more]) == 0
    return folder / "store"


@pytest.mark.parametrize(("name", "more"), [("din", []), ("dien", ["model.auxiliary=0"])])
def test_a_store_with_histories_trains_a_model_of_sequences(
    name: str, more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = a_store(tmp_path)
    settings = [f"data={{dir: {store}, max_history: 3}}", "train.micro_batch=64", "train.global_batch=128", *more]
    assert main(["--config", str(CONFIGS / f"{name}.yaml"), "--dry-run", *settings]) == 0
    shown = capsys.readouterr().out
    assert "histories of up to 3 clicks; features user, candidate, candidate_category, history" in shown
    assert re.search(r"batch +64 samples, forward and backward in .* s, loss \d", shown)


def test_histories_of_a_store_are_padded_and_their_newest_clicks_kept(tmp_path: Path) -> None:
    plain = ClickLog.open(a_store(tmp_path))
    log, rows = SequenceLog(plain, 3), np.array([5, 0, 17, 3])
    padded, bag = log.take(rows).ids["history"], plain.take(rows).ids["history"]
    assert isinstance(padded, torch.Tensor)
    assert isinstance(bag, Bag)
    assert log.tables == {"user": plain.tables["user"], "item": 31, "category": 5}
    for one, ids in zip(padded.tolist(), torch.tensor_split(bag.values, bag.offsets[1:]), strict=True):
        kept = ids[-3:].tolist()
        assert one == kept + [0] * (padded.shape[1] - len(kept))


def test_any_model_trains_on_fields_that_share_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = a_store(tmp_path)
    for kind in ("deepfm", "dlrm", "dcn"):
        settings = [f"data={{dir: {store}}}", f"model.kind={kind}", "model.hidden=[8]", "embedding.dim=4"]
        assert main(["--config", str(CONFIGS / "frappe_deepfm.yaml"), "--dry-run", *settings]) == 0
        assert "5 categorical and 0 numeric fields" in capsys.readouterr().out


def test_a_store_with_other_fields_is_refused_with_the_command_that_prepares_it(tmp_path: Path) -> None:
    store = a_store(tmp_path, ["--categorical", "user,candidate", "--multi", "history"])
    with pytest.raises(BadInput, match=r"models of sequences read other fields than candidate .*--table item=history"):
        open_splits(Data(dir=str(store)), of_sequences=True)


def test_a_store_with_several_labels_is_refused(tmp_path: Path) -> None:
    store = a_store(tmp_path, ["--categorical", "candidate", "--label", "label", "--rating", "user"])
    with pytest.raises(BadInput, match=r"has the labels label, user, and these models learn one label"):
        open_splits(Data(dir=str(store)))
