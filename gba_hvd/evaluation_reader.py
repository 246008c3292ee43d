"""How an evaluation reads a dataset: in order, a forward pass at a time, ahead of the evaluation where that is asked
for. What `evaluate` and `evaluate_retrieval` have in common before their first batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gba_hvd.elastic import TorchState
from gba_hvd.elastic.torch_state import checked_state
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.reading.datasets import Dataset, MapDataset, place_of, reads
from gba_hvd.reading.read_ahead import Share
from gba_hvd.reading.readers import Readers
from gba_hvd.reading.settings import Collate, ReadSettings
from gba_hvd.reading.trained_scaling import other_scaling, scaling_of
from gba_hvd.reading.trained_vocabularies import refuse_other_vocabularies
from gba_hvd.shm.layout import table_seed
from gba_hvd.training.engine import Engine
from gba_hvd.training.mode import SampleReader


def ready_engine(state: TorchState, caller: str) -> Engine:
    """The engine of a job that has a world. Raises BadInput for another kind of state, and GbaError within a step,
    where workers with uneven shares would wait for each other.
    """
    checked_state(state, caller).ensure_synced()
    if state.engine.is_within_step:
        raise GbaError(
            f"{caller} only between steps: workers with uneven shares would wait for each other. To evaluate before "
            "the epoch's end, leave the loop over batches() at a step's end: `break` after an optimizer.step() that "
            "changed state.step. After an interruption within a step, continue the loop to such a point"
        )
    return state.engine


def read_settings(num_workers: int, prefetch: int | None, collate_fn: Collate | None) -> ReadSettings:
    """As `batches` takes them; nothing is read ahead unless it is asked for. Raises BadInput."""
    nothing_asked = prefetch is None and num_workers == 0
    return ReadSettings(num_workers, 0 if nothing_asked else prefetch, collate_fn)


@contextlib.contextmanager
def open_reader(
    engine: Engine,
    dataset: Dataset | MapDataset,
    batch: int | None,
    keys: Callable[[list[Any]], list[np.ndarray]],
    settings: ReadSettings,
) -> Iterator[SampleReader]:
    """What reads the dataset while this lasts.

    batch: samples of a forward pass, default `micro_batch`. keys: the rows that some batches use.
    Raises BadInput for a batch below 1, a dataset without samples, and one that cannot be read by number or copied;
    StateMismatch for one whose ids mean other values than those that the job has trained.
    """
    size = engine.model.micro_batch if batch is None else batch
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise BadInput(f"batch must be a whole number of samples, 1 or more, got {batch!r}")
    take = reads(dataset, settings.collate_fn)
    if not len(dataset):
        raise BadInput("the dataset has no samples")
    engine.reports.not_compared(refuse_other_vocabularies(engine.progress.vocabularies, dataset))
    found = other_scaling(engine.progress.scaling, scaling_of(dataset), "the evaluated dataset")
    engine.reports.scaling_differs(found)
    with contextlib.ExitStack() as stack:
        readers = Readers(dataset, take, settings, _rows, _seed, stack)
        yield SampleReader(take, len(dataset), size, keys, readers.ahead(readers.take), settings.depth)


def naming(dataset: Dataset | MapDataset, samples: SampleReader) -> Callable[[int], str]:
    """A function that names the sample of the dataset at a position in the batch that was read last."""

    def where(sample: int) -> str:
        number = samples.first + sample
        place = place_of(dataset, number) if number < len(dataset) else ""
        return f" (sample {number} of the evaluated dataset{place and ': '}{place})"

    return where


def _rows(share: Share) -> np.ndarray:
    first, n = share
    return np.arange(first, first + n, dtype=np.int64)


def _seed(share: Share) -> int:
    return table_seed(0, f"evaluating samples from {share[0]}")
