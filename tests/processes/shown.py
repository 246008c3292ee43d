"""What the tests of evaluations evaluate: outputs and vectors of few whole numbers that come from ids alone.

So many scores are equal, and what an evaluation should find does not depend on what was trained, in any mode. The
model's tables are used all the same: rows of other hosts must be there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from workload import Clicks, NamedBatch, Training

import gba_hvd

K = (1, 5, 50)
N_ITEMS = 40


class Outputs(nn.Module):
    """[B, 3]: whether it is clicked, whether it is bought after that, stars."""

    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, batch: gba_hvd.Batch) -> Tensor:
        self.tables(batch.ids)
        return outputs_of(*ids_of(batch))


def outputs_of(user: Tensor, item: Tensor) -> Tensor:
    return torch.stack([(user + item) % 5 - 2.0, (user * item) % 4 - 2.0, (user % 3 + item % 4).float()], dim=1)


def ids_of(batch: gba_hvd.Batch) -> Iterator[Tensor]:
    for name in ("user", "item"):
        values = batch.ids[name]
        assert isinstance(values, Tensor)
        yield values


def bought(batch: gba_hvd.Batch) -> Tensor:
    user, item = ids_of(batch)
    return batch.label * ((user + 2 * item) % 3 == 0)


def stars(batch: gba_hvd.Batch) -> Tensor:
    return 1.0 + next(ids_of(batch)) % 5


TASKS = {
    "ctr": gba_hvd.Task(metrics=["auc", "logloss", "gauc"], group=lambda b: b.ids["item"], label=lambda b: b.label),
    "cvr": gba_hvd.Task(label=bought, where=lambda b: b.label),
    "stars": gba_hvd.Task(label=stars, metrics=["mse", "mae"]),
}


class AllItems:
    def __len__(self) -> int:
        return N_ITEMS

    def take(self, rows: np.ndarray) -> NamedBatch:
        ids: dict[str, Any] = {"user": torch.zeros(len(rows)).long(), "item": torch.from_numpy(rows)}
        return NamedBatch(ids, torch.zeros(len(rows), 2), torch.zeros(len(rows)), rows=tuple(rows.tolist()))


def vectors_of(numbers: Tensor) -> Tensor:
    return torch.stack([numbers % 3 - 1.0, numbers % 4 - 1.0, numbers % 2 - 0.5], dim=1)


def relevant(batch: gba_hvd.Batch) -> gba_hvd.Bag:
    """Of a user none, one or two items; one that is not there among them."""
    user = next(ids_of(batch))
    n = user % 3
    offsets = torch.cumsum(n, 0) - n
    values = [(int(u) * (i + 1)) % (N_ITEMS + 3) for u in user for i in range(int(u) % 3)]
    return gba_hvd.Bag(torch.tensor(values, dtype=torch.int64), offsets)


def seen(batch: gba_hvd.Batch) -> Tensor:
    return next(ids_of(batch)) % N_ITEMS


def evaluated(training: Training, n: int = 200, **reading: Any) -> dict[str, Any]:
    """What this worker finds, as plain values. reading: arguments of both evaluations"""
    tables, state, data = training.tables, training.state, Clicks(n)
    tasks = gba_hvd.evaluate(Outputs(tables), data, state, batch=16, activation="sigmoid", tasks=TASKS, **reading)

    def vectors(batch: gba_hvd.Batch, name: str) -> Tensor:
        tables(batch.ids)
        return vectors_of(dict(zip(("user", "item"), ids_of(batch), strict=True))[name])

    found = gba_hvd.evaluate_retrieval(
        training.model, data, AllItems(), state, query_vectors=lambda b: vectors(b, "user"), relevant=relevant,
        item_vectors=lambda b: vectors(b, "item"), seen=seen, k=K, batch=16,
        **reading,
    )  # fmt: skip
    counts = [found.n, found.n_left_out, found.n_items, found.n_unknown]
    groups = [tasks["ctr"].n_groups, tasks["ctr"].n_groups_left_out]
    return {
        "tasks": {name: dict(one.values) for name, one in tasks.items()}, "n": [one.n for one in tasks.values()],
        "groups": groups, "retrieval": found.values, "counts": counts,
    }  # fmt: skip


def softmax_loss(training: Training, batch: gba_hvd.Batch) -> Tensor:
    """A loss with negatives of all workers, of the model's tables and its first layer."""
    model = training.model
    rows = model.tables(batch.ids)
    hidden = torch.tanh(model.mlp[0](torch.cat([rows["user"], rows["item"], batch.dense], dim=1)))
    item = next(reversed(list(ids_of(batch))))
    return gba_hvd.in_batch_softmax(
        hidden[:, :6] + rows["user"][:, :6], rows["item"] + hidden[:, 6:12], item_ids=item, log_q=-(item % 5).float(),
        temperature=0.5, negatives="global", state=training.state,
    )  # fmt: skip
