"""Tables of a model that is on a device, against the same tables on the CPU."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd import BadInput, Bag, EmbeddingTables, Feature
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.embedding.on_device.copies import AllRows
from gba_hvd.embedding.on_device.host_view import HostView
from gba_hvd.embedding.on_device.prepared_ids import PreparedIds
from gba_hvd.embedding.on_device.rows import DeviceRows
from recovery import CheckpointCallback

MakeTables = Callable[..., EmbeddingTables]
SIZES: Any = {"user": gba_hvd.Table(50, 4, padding_idx=0), "item": (90, 4), "ad": (30, 7)}
FEATURES: Any = {
    "history": Feature("item", pooling=None),
    "last": Feature("item", pooling=None),
    "liked": Feature("item", "mean"),
    "best": Feature("item", "max"),
    "candidate": "item",
}


def ids(seed: int = 1) -> dict[str, Any]:
    """Every form of ids, of six samples."""
    rng = np.random.default_rng(seed)

    def some(n_rows: int, *shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(0, n_rows, shape))

    jagged = torch.nested.nested_tensor([some(90, n) for n in (2, 0, 3, 1, 1, 2)], layout=torch.jagged)
    weights = torch.from_numpy(rng.normal(size=12).astype(np.float32))
    cuts = torch.tensor([0, 0, 5, 5, 9, 11])
    return {
        "user": some(50, 6, 3), "candidate": some(90, 6), "history": some(90, 6, 4), "last": jagged,
        "liked": Bag(some(90, 12), cuts, weights), "best": Bag(some(90, 12), cuts), "ad": Bag(some(30, 12), cuts),
    }  # fmt: skip


def values_of(rows: Tensor) -> Tensor:
    return rows.values() if rows.is_nested else rows


def gradients(tables: EmbeddingTables) -> dict[int, np.ndarray]:
    """By key, of all groups."""
    found: dict[int, np.ndarray] = {}
    for group, grads in enumerate(tables.take_gradients()):
        for grad in grads:
            for key, value in zip(grad.keys.tolist(), grad.values, strict=True):
                at = (key << 2) + group
                found[at] = found.get(at, 0) + value
    return found


@pytest.mark.parametrize("hot_rows", [0, 64, "all"])
def test_every_form_of_ids_gives_the_rows_and_gradients_that_the_cpu_gives(
    device: torch.device, make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch, hot_rows: int | str
) -> None:
    ours = make_tables(SIZES, features=FEATURES, hot_rows=hot_rows).to(device)
    monkeypatch.setenv("GBA_HVD_DEVICE_ROWS", "off")
    theirs = make_tables(SIZES, features=FEATURES)
    for seed in range(3):
        one, other = ours(ids(seed)), theirs(ids(seed))
        assert list(one) == list(other)
        for name, rows in other.items():
            assert one[name].device == device
            torch.testing.assert_close(values_of(one[name]).cpu(), values_of(rows), msg=lambda m, n=name: f"{n}: {m}")
            factor = torch.randn(values_of(rows).shape, generator=torch.Generator().manual_seed(seed))
            (values_of(one[name]) * factor.to(device)).sum().backward()
            (values_of(rows) * factor).sum().backward()
        found, expected = gradients(ours), gradients(theirs)
        assert set(found) >= {key for key, value in expected.items() if value.any()}
        for key, value in expected.items():
            np.testing.assert_allclose(found.get(key, 0 * value), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hot_rows", [0, "all"])
def test_rows_of_features_that_no_loss_depends_on_have_a_gradient_of_zeros(
    device: torch.device, make_tables: MakeTables, hot_rows: int | str
) -> None:
    tables = make_tables({"user": (50, 4), "item": (90, 4)}, hot_rows=hot_rows).to(device)
    tables.counts_accesses = True
    rows = tables({"user": torch.tensor([3, 3, 9]), "item": torch.tensor([7, 7, 7])})
    for _ in range(2):
        rows["user"].sum().backward(retain_graph=True)
    (grad,) = tables.take_gradients()[0]
    keys = tables.keys_of(0, [("user", torch.tensor([3, 9])), ("item", torch.tensor([7]))])
    assert grad.keys.tolist() == sorted(keys.tolist()) and grad.accesses is not None
    found = {key: (values[0], n) for key, values, n in zip(grad.keys, grad.values, grad.accesses, strict=True)}
    assert [found[key] for key in keys] == [(4.0, 2), (2.0, 1), (0.0, 3)]


@pytest.mark.parametrize("hot_rows", [0, "all"])
def test_weights_of_bags_get_their_gradient(device: torch.device, make_tables: MakeTables, hot_rows: int | str) -> None:
    tables = make_tables({"item": (90, 4), "user": (20, 4)}, hot_rows=hot_rows).to(device)
    weights = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    found = tables({"item": Bag(torch.tensor([5, 6, 7]), torch.tensor([0, 2]), weights), "user": torch.tensor([1, 2])})
    found["user"].sum().backward(retain_graph=True)
    assert weights.grad is None
    found["item"].sum().backward()
    expected = tables.rows("item", [5, 6, 7]).sum(1)
    assert weights.grad is not None
    np.testing.assert_allclose(weights.grad.numpy(), expected, rtol=1e-5)


def test_stacked_gives_what_the_single_features_give(device: torch.device, make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 4), "item": (90, 4)}).to(device)
    some = {"user": torch.tensor([3, 3, 9]), "item": torch.tensor([1, 0, 1])}
    stacked = tables.stacked(some)
    assert stacked.device == device and stacked.shape == (3, 2, 4)
    torch.testing.assert_close(stacked, torch.stack(list(tables(some).values()), dim=1))
    bags = {"user": torch.tensor([[3, 3], [9, 1], [2, 2]]), "item": torch.tensor([1, 0, 1])}
    torch.testing.assert_close(tables.stacked(bags), torch.stack(list(tables(bags).values()), dim=1))


def test_an_id_outside_its_table_is_named(device: torch.device, make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 4)}).to(device)
    with pytest.raises(BadInput, match="table 'user' has rows 0 to 49, got id 50 in sample 1"):
        tables({"user": torch.tensor([1, 50])})
    with pytest.raises(BadInput, match="no table named 'nobody'"):
        tables({"nobody": torch.tensor([1])})


# --- a job -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, tables: EmbeddingTables) -> None:
        super().__init__()
        self.tables = tables
        torch.manual_seed(3)
        self.mlp = nn.Sequential(nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        device = self.mlp[0].weight.device
        rows = self.tables(batch.ids)
        parts = [rows["user"], rows["item"].to(device), batch.dense.to(device)]
        logits: Tensor = self.mlp(torch.cat(parts, dim=1)).squeeze(1)
        return logits


def train(folder: Path, clicks: Any, device: torch.device, epochs: int = 3, **settings: Any) -> dict[str, Any]:
    """A job of one worker, to its end: rows, counters, dense parameters, the losses' sum.

    scores: each step also has lookups that leave no gradient
    """
    more, scores = settings.pop("more", {}), settings.pop("scores", False)
    hashed = gba_hvd.Table(dim=3, keys="hash64", capacity=64) if settings.pop("hashed", False) else (7, 3)
    tables = EmbeddingTables(
        {"user": (20, 4), "item": hashed}, gba_hvd.RowAdagrad(lr=0.5), seed=2, n_shards=3, shard_dir=folder, **settings
    )
    model = Model(tables).to(device)
    optimizer = gba_hvd.DistributedOptimizer(
        torch.optim.Adagrad(model.parameters(), lr=0.1), tables, **({"global_batch": 16, "micro_batch": 4} | more)
    )
    state = gba_hvd.elastic.TorchState(model, optimizer)
    events: list[Any] = []

    class Notes(gba_hvd.Callback):
        def on_event(self, event: gba_hvd.Event) -> None:
            events.append(event)

    state.register_callbacks([Notes()])
    losses = 0.0
    for _ in range(epochs):
        for batch in gba_hvd.batches(clicks, state):
            optimizer.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label.to(device))
            loss.backward()
            if scores:
                with torch.no_grad():
                    model(batch)
            optimizer.step(loss=loss)
            losses += loss.item()
    assert tables.memory is not None
    # Of hashed tables the gauges at the end of an epoch are what reads.
    is_by_device = tables.on_device.current is not None and tables.on_device.applies
    is_by_device = is_by_device and not any(table.keys for table in tables.tables.values())
    assert tables.memory.is_written_by_device == is_by_device, "the last step is not waited for, but by who reads"
    result = {
        "losses": losses,
        "user": tables.rows("user", np.arange(20)),
        "sum": tables.rows("user", np.arange(20), "sum"),
        "item": tables.rows("item", np.arange(7)),
        **{name: p.detach().cpu().numpy() for name, p in model.named_parameters()},
    }
    assert tables.memory is not None
    group = tables.layout.groups[0]
    starts = tables.layout.record_starts(tables.keys_of(0, [("user", torch.arange(20))]), group)
    result["counts"] = tables.memory.words[starts.astype(np.int64) + group.record - 1].copy()
    result["events"] = [event.message for event in events if event.kind == "device_rows"]
    result["hits"] = tables.on_device.hit_share
    state.close()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"hot_rows": 16},
        {"hot_rows": 16, "scores": True},
        {"hot_rows": "all"},
        {"hot_rows": "all", "scores": True},
        {"hot_rows": "all", "more": {"max_norm": 0.05}},
        {"hot_rows": "all", "hashed": True},
        {"hot_rows": "all", "more": {"micro_batch": 16}},
        {"hot_rows": "all", "scores": True, "more": {"micro_batch": 10, "global_batch": 10}},
        {"hot_rows": 16, "more": {"row_average": "contributors"}},
        {"more": {"max_norm": 0.05}},
        {"more": {"row_average": "contributors"}},
        {"more": {"row_compression": gba_hvd.Compression.int8}},
        {"hashed": True},
        {"more": {"sync_micro_batch": 8}},
    ],
    ids=[
        "plain",
        "hot",
        "hot, scores",
        "all",
        "all, scores",
        "all, clip",
        "all, hashed",
        "all, at once",
        "all, at once, scores",
        "outdated copies",
        "clip",
        "contributors",
        "compression",
        "hashed",
        "together",
    ],
)
def test_a_job_trains_what_it_trains_without(
    device: torch.device, clicks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    ours = train(tmp_path / "ours", clicks(50), device, **dict(settings))
    monkeypatch.setenv("GBA_HVD_DEVICE_ROWS", "off")
    theirs = train(tmp_path / "theirs", clicks(50), torch.device("cpu"), **{**settings, "hot_rows": 0})
    assert theirs["events"] == [] and "reads the rows" in ours["events"][0]
    is_unused = "hot_rows" in settings and "row_average" in settings.get("more", {})
    assert [text for text in ours["events"] if "hot_rows has no effect" in text] == ours["events"][1:]
    assert len(ours["events"]) == 1 + is_unused
    assert ours["hits"] is None if "hot_rows" not in settings else (ours["hits"] > 0.2) != is_unused
    for name, value in theirs.items():
        if name not in ("events", "hits"):
            np.testing.assert_allclose(ours[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_array_equal(ours["counts"], theirs["counts"])


class Stacked(nn.Module):
    """own_ids: it looks up ids in a mapping of its own"""

    def __init__(self, tables: EmbeddingTables, own_ids: bool) -> None:
        super().__init__()
        self.tables, self.own_ids, self.is_prepared = tables, own_ids, [False]
        self.top = nn.Linear(8, 1)

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        self.is_prepared.append(isinstance(batch.ids, PreparedIds))
        rows = self.tables.stacked(dict(batch.ids) if self.own_ids else batch.ids)
        logits: Tensor = self.top(rows.flatten(1)).squeeze(1)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("hot_rows", [0, "all"])
def test_keys_of_batches_that_are_read_ahead_are_on_the_device(
    device: torch.device, clicks: Any, tmp_path: Path, hot_rows: int | str
) -> None:
    found = {}
    for own_ids in (False, True):
        tables = EmbeddingTables(
            {"user": (20, 4), "item": (7, 4)}, gba_hvd.RowAdagrad(lr=0.5), seed=2, n_shards=3,
            shard_dir=tmp_path / str(own_ids), hot_rows=hot_rows,
        )  # fmt: skip
        torch.manual_seed(3)
        model = Stacked(tables, own_ids).to(device)
        dense = torch.optim.SGD(model.parameters(), 0.1)
        optimizer = gba_hvd.DistributedOptimizer(dense, tables, global_batch=16, micro_batch=4)
        state = gba_hvd.elastic.TorchState(model, optimizer)
        for _ in range(20):
            for batch in gba_hvd.batches(clicks(50), state):
                optimizer.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label.to(device))
                loss.backward()
                optimizer.step()
        found[own_ids] = tables.rows("user", np.arange(20))
        # Those of a model that makes ids of its own are not prepared for ever.
        assert sum(model.is_prepared) > (50 if own_ids else 200)
        assert model.is_prepared[-1] != own_ids
        state.close()
    np.testing.assert_array_equal(found[False], found[True])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_prepared_ids_that_were_changed_are_looked_up_as_they_are(
    device: torch.device, make_tables: MakeTables, dtype: torch.dtype
) -> None:
    tables = make_tables({"user": (50, 4), "item": (90, 4)}).to(device)

    def batch() -> gba_hvd.Batch:
        ids = {"user": torch.tensor([3, 3, 9], dtype=dtype), "item": torch.tensor([1, 0, 1], dtype=dtype)}
        return gba_hvd.Batch(ids, torch.zeros(3, 0), torch.zeros(3))

    expected = tables.stacked(batch().ids).detach()
    prepared = tables.prepare(batch())
    assert isinstance(prepared.ids, PreparedIds)
    torch.testing.assert_close(tables.stacked(prepared.ids), expected)
    prepared.ids["user"][0] = 9
    torch.testing.assert_close(tables.stacked(prepared.ids)[0, 0], expected[2, 0])
    prepared.ids["user"] = torch.tensor([9, 9, 9])
    torch.testing.assert_close(tables.stacked(prepared.ids)[:, 0], expected[[2, 2, 2], 0])
    outside = replace(batch(), ids={"user": torch.tensor([50]), "item": torch.tensor([1])})
    assert tables.prepare(outside) is outside
    with torch.inference_mode():
        untracked = batch()
    assert tables.prepare(untracked) is untracked


def test_prepared_ids_are_plain_ids_for_other_tables_and_other_code(
    device: torch.device, make_tables: MakeTables
) -> None:
    tables, others = (make_tables({"user": (50, 4), "item": (90, 4)}, seed=seed).to(device) for seed in (1, 2))
    ids = {"user": torch.tensor([3, 3, 9]), "item": torch.tensor([1, 0, 1])}
    expected = [one.stacked(ids).detach() for one in (tables, others)]
    prepared = tables.prepare(gba_hvd.Batch(ids, torch.zeros(3, 0), torch.zeros(3))).ids
    moved = type(prepared)({name: column.clone() for name, column in prepared.items()})
    for some in (prepared, moved, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert dict(some).keys() == ids.keys()
        for one, rows in zip((tables, others), expected, strict=True):
            torch.testing.assert_close(one.stacked(some), rows)


def test_evaluations_between_epochs_do_not_end_the_preparing(device: torch.device, make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 4)}).to(device)
    batch = gba_hvd.Batch({"user": torch.tensor([3, 9])}, torch.zeros(2, 0), torch.zeros(2))
    for _ in range(300):
        tables.stacked(batch.ids)
    assert isinstance(tables.prepare(batch).ids, PreparedIds)


def test_without_room_for_copies_the_device_reads_the_hosts_memory(
    device: torch.device, make_tables: MakeTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[HostView] = []

    def no_room(*of: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    def register(view: HostView, *of: Any) -> None:
        assert not any(view.tensor.numel() for view in registered), "a driver takes no memory twice"
        make(view, *of)
        registered.append(view)

    make = HostView.__init__
    monkeypatch.setattr(HostView, "__init__", register)
    monkeypatch.setattr(AllRows, "__init__", no_room)
    tables = make_tables({"user": (50, 4)}, hot_rows="all").to(device)
    tables({"user": torch.tensor([1, 2])})
    (decision,) = tables.on_device.decisions
    assert decision.by_device and decision.is_warning and len(registered) == 2
    assert "no room for copies (CUDA out of memory" in decision.text and "hot_rows has no effect" in decision.text


def test_a_job_may_begin_with_scores_in_inference_mode(device: torch.device, clicks: Any, tmp_path: Path) -> None:
    tables = EmbeddingTables(
        {"user": (20, 4), "item": (7, 3)}, gba_hvd.RowAdagrad(lr=0.5), n_shards=3, shard_dir=tmp_path, hot_rows=8
    )
    model = Model(tables).to(device)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = gba_hvd.DistributedOptimizer(dense, tables, global_batch=16, micro_batch=16)
    state = gba_hvd.elastic.TorchState(model, optimizer)
    state.sync()
    with torch.inference_mode():
        model(clicks(50).take(np.arange(9)))
    for batch in gba_hvd.batches(clicks(50), state):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label.to(device)).backward()
        optimizer.step()
    assert tables.on_device.current is not None
    state.close()
    assert tables.on_device.current is None  # the memory is let go


def test_what_keeps_rows_from_the_device_is_reported_once(device: torch.device, make_tables: MakeTables) -> None:
    hashed = make_tables({"user": gba_hvd.Table(dim=4, keys="hash64", capacity=64)}).to(device)
    plain = make_tables({"user": (50, 4)}).to(device)
    several = make_tables({"user": (50, 4)}, hot_rows=5).to(device)
    several.local = np.ones(3, bool)
    for tables, why in ((hashed, "all tables are hashed"), (plain, "several threads"), (several, "on several hosts")):
        for _ in range(3):
            if tables is plain:
                with tables.apart():
                    tables({"user": torch.tensor([1, 2])})
            else:
                tables({"user": torch.tensor([1, 2])})
        (decision,) = tables.on_device.decisions
        assert why in decision.text and not decision.by_device
        assert decision.is_warning == ("hot_rows has no effect" in decision.text) == (tables is several)


def test_another_kind_of_device_gets_copies_of_what_the_cpu_looked_up(make_tables: MakeTables) -> None:
    tables = make_tables({"user": (50, 4)})
    tables.device = torch.device("meta")
    assert tables({"user": torch.tensor([1, 2])})["user"].device.type == "meta"
    (decision,) = tables.on_device.decisions
    assert decision.text.startswith("meta cannot read the host's memory")


def test_jagged_features_of_the_same_ids_fit_together(device: torch.device, make_tables: MakeTables) -> None:
    features = {"item": Feature("item", None), "kind": Feature("kind", None)}
    tables = make_tables({"item": (50, 4), "kind": (9, 4)}, features=features).to(device)
    ids = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])], layout=torch.jagged)
    found = tables({"item": ids, "kind": ids})
    assert (found["item"] + found["kind"]).values().shape == (3, 4)


def test_converted_modules_give_their_tables_the_device_of_the_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(4, 1))
    tables = gba_hvd.convert(model, optimizer=gba_hvd.SGD(lr=0.1), n_shards=3, shard_dir=tmp_path)
    tables.device = torch.device("cuda", 1)
    model.cpu()
    assert tables.device == torch.device("cpu")


@pytest.mark.slow
def test_the_training_state_is_kept_after_the_rows_are_written(
    device: torch.device, clicks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    wait, finish, encoded = DeviceRows.wait, DeviceRows.finish, TrainingState.encoded
    monkeypatch.setattr(DeviceRows, "wait", lambda rows: (wait(rows), done.append("written")))
    monkeypatch.setattr(DeviceRows, "finish", lambda *of: (finish(*of), done.append("applied")))
    monkeypatch.setattr(TrainingState, "encoded", lambda state: (done.append("kept"), encoded(state))[1])
    tables = EmbeddingTables({"user": (20, 4), "item": (7, 3)}, gba_hvd.SGD(lr=0.5), n_shards=3, shard_dir=tmp_path)
    model = Model(tables).to(device)
    dense = torch.optim.SGD(model.parameters(), 0.1)
    optimizer = gba_hvd.DistributedOptimizer(dense, tables, global_batch=16, micro_batch=16)
    state = gba_hvd.elastic.TorchState(model, optimizer)
    state.register_callbacks([CheckpointCallback(str(tmp_path / "saved"), every_steps=100, retain_state_share=1.0)])
    for _ in range(3):
        for batch in gba_hvd.batches(clicks(50), state):
            optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label.to(device)).backward()
            optimizer.step()
    assert done.count("kept") >= 3 and done.count("applied") == 12
    assert all(before != "applied" for before, now in itertools.pairwise(done) if now == "kept")
    state.close()


# --- what is refused -------------------------------------------------------------------------------------------------


def test_hot_rows_without_a_gpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = EmbeddingTables({"user": (20, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path, hot_rows=10)
    model = nn.Linear(4, 1)
    with pytest.raises(BadInput, match=r"hot_rows asks for copies in a GPU's memory, and the tables are on the CPU"):
        gba_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), tables, global_batch=4, micro_batch=4)
    monkeypatch.setenv("GBA_HVD_DEVICE_ROWS", "off")
    tables = EmbeddingTables({"user": (20, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path, hot_rows=10)
    with pytest.raises(BadInput, match="GBA_HVD_DEVICE_ROWS=off"):
        gba_hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), tables, global_batch=4, micro_batch=4)


@pytest.mark.parametrize("hot_rows", [-1, 1.5, True, "many"])
def test_a_number_of_hot_rows_that_is_none_is_refused(tmp_path: Path, hot_rows: Any) -> None:
    with pytest.raises(BadInput, match="expected a whole number of at least 0"):
        EmbeddingTables({"user": (20, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path, hot_rows=hot_rows)


def test_hot_rows_of_hashed_tables_alone_are_refused(tmp_path: Path) -> None:
    hashed = gba_hvd.Table(dim=4, keys="hash64", capacity=100)
    with pytest.raises(BadInput, match="keeps none of hashed tables"):
        EmbeddingTables({"user": hashed}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path, hot_rows=10)


def test_another_word_for_when_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GBA_HVD_DEVICE_ROWS", "sometimes")
    with pytest.raises(BadInput, match="device_rows"):
        EmbeddingTables({"user": (20, 4)}, gba_hvd.SGD(lr=0.1), shard_dir=tmp_path)
