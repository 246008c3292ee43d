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


def test_names() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert untrained(model, model[0].parameters()) == ["1.weight", "1.bias"]
    assert names_in_words(["a", "b"]) == "a, b"
    assert names_in_words(list("abcdefg")) == "a, b, c, d, e and 2 more"
