"""Who trains a parameter: named when nobody does, or when somebody else does, and no false alarm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gba_hvd
from gba_hvd.errors import BadInput
from gba_hvd.training.parameter_watch import names_in_words, untrained


class Clicks:
    def __len__(self) -> int:
        return 64

    def take(self, rows: np.ndarray) -> gba_hvd.Batch:
        ids = torch.from_numpy(rows % 10)
        return gba_hvd.Batch({"user": ids}, torch.ones(len(rows), 2), (ids % 2).float())


class Model(nn.Module):
    def __init__(self, tables: gba_hvd.EmbeddingTables) -> None:
        super().__init__()
        self.tables, self.body, self.head = tables, nn.Linear(6, 3), nn.Linear(3, 1)
        self.tied = self.body.weight  # the same tensor by another name

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        out: Tensor = self.head(self.body(torch.cat([self.tables(batch.ids)["user"], batch.dense], 1))).squeeze(1)
        return out


class Warnings(gba_hvd.Callback):
    def __init__(self) -> None:
        self.reported: dict[str, list[str]] = {}

    def on_event(self, event: gba_hvd.Event) -> None:
        if event.level == "warning":
            assert event.kind not in self.reported, "once"
            self.reported[event.kind] = event.data["parameters"]


@contextmanager
def job(folder: Path, forget: str = "") -> Iterator[tuple[Model, Any, gba_hvd.elastic.TorchState, Warnings]]:
    """forget: parameters whose name begins so are not given to the optimizer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GBA_HVD_SHARD_DIR", str(folder))
        patch.setenv("GBA_HVD_GRACE_S", "0")
        torch.manual_seed(1)
        tables = gba_hvd.EmbeddingTables({"user": (10, 4)}, optimizer=gba_hvd.Adagrad(lr=0.1), n_shards=2)
        model = Model(tables)
        mine = [p for name, p in model.named_parameters() if not (forget and name.startswith(forget))]
        optimizer = gba_hvd.DistributedOptimizer(torch.optim.SGD(mine, lr=0.1), tables, global_batch=8, micro_batch=4)
        state, received = gba_hvd.elastic.TorchState(model, optimizer, epoch=0), Warnings()
        state.register_callbacks([received])
        yield model, optimizer, state, received
        state.close()


def train(model: Model, optimizer: Any, state: gba_hvd.elastic.TorchState, after_batch: Any = lambda n: None) -> None:
    for n, batch in enumerate(gba_hvd.batches(Clicks(), state)):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.label)
        loss.backward()
        optimizer.step(loss=loss)
        after_batch(n)


def test_a_parameter_in_no_group_is_named_when_training_begins(tmp_path: Path) -> None:
    with job(tmp_path, forget="head") as (model, optimizer, state, received):
        train(model, optimizer, state)
        assert received.reported == {"parameters_untrained": ["head.weight", "head.bias"]}


def test_a_parameter_of_a_second_optimizer_is_named(tmp_path: Path) -> None:
    with job(tmp_path) as (model, optimizer, state, received):
        second = torch.optim.SGD(model.head.parameters(), lr=0.1)

        def step_second(n: int) -> None:
            for p in model.head.parameters():
                p.grad = torch.ones_like(p)
            second.step()

        train(model, optimizer, state, step_second)
        assert received.reported == {"parameters_written": ["head.weight", "head.bias"]}


def test_no_false_alarm(tmp_path: Path) -> None:
    """Weights that are loaded, an average of the model, tied weights, a frozen part."""
    with job(tmp_path, forget="head.bias") as (model, optimizer, state, received):
        model.head.bias.requires_grad_(False)
        average = torch.optim.swa_utils.AveragedModel(model.body)

        def beside(n: int) -> None:
            average.update_parameters(model.body)
            if n in (5, 11):
                model.body.load_state_dict(average.module.state_dict())

        train(model, optimizer, state, beside)
        assert received.reported == {}


def test_a_group_that_is_added_before_the_first_batch_trains_as_one_from_the_start(tmp_path: Path) -> None:
    with job(tmp_path / "all") as (model, optimizer, state, _):
        train(model, optimizer, state)
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    with job(tmp_path / "added", forget="head") as (model, optimizer, state, received):
        state.register_callbacks([gba_hvd.GBACallback()])
        optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.1})
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 2, 1]
        assert optimizer.param_groups[-1]["gba_hvd"] == "tables"
        train(model, optimizer, state)
        assert received.reported == {}
        assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.items())
        assert list(state.training_state.state_dict()["script_rates"]) == ["dense group 0", "dense group 1", "rows"]


def test_a_group_that_cannot_be_trained_leaves_the_optimizer_as_it_was(tmp_path: Path) -> None:
    with job(tmp_path, forget="head") as (model, optimizer, state, received):
        with pytest.raises(BadInput, match="must share one dtype"):
            optimizer.add_param_group({"params": nn.Linear(3, 1).double().parameters()})
        optimizer.add_param_group({"params": model.head.parameters()})
        train(model, optimizer, state)
        assert received.reported == {}


def test_a_group_beside_which_the_rule_could_not_be_kept_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, forget="head") as (model, optimizer, state, _):
        optimizer.param_groups[0]["momentum"] = 0.9
        state.register_callbacks([gba_hvd.GBACallback(rule="dana_slim")])
        groups = list(optimizer.param_groups)
        with pytest.raises(BadInput, match="dana_slim"):
            optimizer.add_param_group({"params": model.head.parameters(), "nesterov": True, "momentum": 0.9})
        assert optimizer.param_groups == groups


def test_a_group_that_comes_after_a_scheduler_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, forget="head") as (model, optimizer, _, _):
        torch.optim.lr_scheduler.ConstantLR(optimizer)
        with pytest.raises(BadInput, match="a learning-rate scheduler was made for this optimizer already"):
            optimizer.add_param_group({"params": model.head.parameters()})


def test_a_group_that_is_added_later_is_refused(tmp_path: Path) -> None:
    with job(tmp_path, forget="head") as (model, optimizer, state, _):
        train(model, optimizer, state)
        with pytest.raises(BadInput, match=r"add_param_group: training has begun.*\bAdd parameters before state.sync"):
            optimizer.add_param_group({"params": model.head.parameters()})
        assert len(optimizer.param_groups) == 2


def test_a_module_that_is_replaced_between_epochs_is_named(tmp_path: Path) -> None:
    with job(tmp_path) as (model, optimizer, state, received):
        train(model, optimizer, state)
        assert received.reported == {}
        model.head = nn.Linear(3, 1)
        for state.epoch in (1, 2):
            train(model, optimizer, state)
        assert received.reported == {"parameters_untrained": ["head.weight", "head.bias"]}


@pytest.mark.parametrize("how", ["put into the list", "unfrozen"])
def test_a_parameter_in_a_group_that_workers_do_not_exchange_is_refused(tmp_path: Path, how: str) -> None:
    with job(tmp_path, forget="head") as (model, optimizer, state, _):
        if how == "unfrozen":
            model.head.requires_grad_(False)
            optimizer.add_param_group({"params": model.head.parameters()})
        train(model, optimizer, state)
        if how == "unfrozen":
            model.head.requires_grad_(True)
        else:
            optimizer.param_groups[0]["params"] += list(model.head.parameters())
        state.epoch = 1
        with pytest.raises(BadInput, match=r"^head\.weight, head\.bias: in a group of the optimizer, and workers do"):
            train(model, optimizer, state)


def test_names() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert untrained(model, model[0].parameters()) == ["1.weight", "1.bias"]
    assert names_in_words(["a", "b"]) == "a, b"
    assert names_in_words(list("abcdefg")) == "a, b, c, d, e and 2 more"
