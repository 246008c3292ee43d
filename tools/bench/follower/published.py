"""What each checkpoint of a job is: digests of its state, and of its answer to the request, without a follower.

Rows and dense part come from `OpenCheckpoint`, as `recovery.open_checkpoint` gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gba_hvd.serving.module import freeze
from recovery.catalog.chains import Skipped, chains
from recovery.restore.inspect import read_state
from recovery.restore.open_checkpoint import OpenCheckpoint
from recovery.storage.open import open_store

from ..serving import ours
from . import workload


@dataclass(frozen=True)
class Published:
    """A checkpoint. flaw: why it cannot be opened; its digests are empty then"""

    name: str
    step: int
    state: str
    answer: str
    flaw: str = ""


class ReadRows:
    """A `frozen_rows.RowReader` of an array. rows: float32 [n, dim]"""

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows

    def gather(self, keys: np.ndarray, out: np.ndarray) -> None:
        np.take(self._rows, keys, axis=0, out=out)

    def has(self, keys: np.ndarray) -> np.ndarray:
        return np.ones(len(keys), np.bool_)

    def keys(self) -> np.ndarray:
        return np.arange(len(self._rows))


def published(url: Path, n_rows: int) -> Iterator[Published]:
    """Every checkpoint of the store, newest first."""
    store, shape = open_store(url), workload.shape(n_rows)
    model, request = ours.build(workload.MODEL, n_rows), workload.request(shape)
    for chain in chains(store):
        if isinstance(chain, Skipped):
            yield Published(chain.name, -1, "", "", chain.why)
            continue
        opened = OpenCheckpoint(store, chain, read_state(store, chain.newest), ())
        rows, dense = {name: opened.rows(name) for name in shape.tables}, opened.dense()
        freeze(model, [model.tables], {name: ReadRows(values) for name, values in rows.items()})
        model.load_state_dict(dense)
        state = workload.digest(rows.values(), dense)
        yield Published(opened.name, opened.step, state, workload.digest_of_answer(model(request)))
