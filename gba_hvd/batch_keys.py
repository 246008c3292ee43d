"""Which rows a batch uses: by its ids, or by a forward pass that only records its lookups.

On several hosts the rows of other hosts are fetched before the loop computes a batch. Where the ids are computed
inside the model, its forward pass runs once before that, without gradients and without rows, and nothing of it remains:
what it draws at random and what it writes to buffers is put back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from gba_hvd.elastic import rng_state
from gba_hvd.embedding.bags import BagLookups
from gba_hvd.embedding.joined_tables import keys_by_group
from gba_hvd.embedding.keyed_jagged import AnyIds, by_feature
from gba_hvd.embedding.lookup_recorder import AllRecorded, PassLength
from gba_hvd.embedding.lookups import Ids
from gba_hvd.embedding.tables import EmbeddingTables
from gba_hvd.errors import BadInput, GbaError

FindIds = Callable[[Any], AnyIds]
Forward = Callable[[Any], Any]


class BatchKeys:
    """The keys of batches, by group of tables.

    ids: where a batch has its ids, as `gba_hvd.batches` takes it. forward: how the loop calls the model. Without
    either, the batch's `ids` count, unless the model finds ids itself (`gba_hvd.convert`) or the batch has none; then
    `model(batch)` is run.
    shares_random: other threads draw random numbers at the same time, so theirs are not put back
    """

    def __init__(
        self, tables: EmbeddingTables, model: nn.Module, ids: FindIds | None, forward: Forward | None,
        shares_random: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._tables, self._model, self._ids, self._forward = tables, model, ids, forward
        self._shares_random = shares_random
        self._length = {True: PassLength(), False: PassLength()}  # of a model that trains, and of one that does not

    def runs_model(self, batch: Any) -> bool:
        """The model is needed to find the keys of this batch, so only the thread that trains it may ask for them."""
        if self._ids is not None or self._forward is not None:
            return self._ids is None
        return self._tables.looks_up_inside or _ids_in(batch) is None

    def ids_by_function(self, batch: Any) -> Ids | None:
        """What `ids` of `gba_hvd.batches` finds in a batch, if there is such a function."""
        return None if self._ids is None else by_feature(self._ids(batch))

    def of(self, batches: Sequence[Any]) -> list[np.ndarray]:
        """Per group of tables int64 [n].

        Raises BadInput when a forward pass is needed and fails, or looks up nothing.
        """
        with_ids = [self._ids_of(batch) for batch in batches if not self.runs_model(batch)]
        found = [[keys] for keys in keys_by_group(self._tables, with_ids)]
        inside = [batch for batch in batches if self.runs_model(batch)]
        if inside:
            restored = contextlib.nullcontext() if self._shares_random() else rng_state.unchanged()
            with restored, torch.no_grad():
                for batch in inside:
                    for of_group, keys in zip(found, self._recorded(batch), strict=True):
                        of_group.extend(keys)
        return [np.concatenate(of_group) for of_group in found]

    def bags_of(self, batches: Sequence[Any]) -> BagLookups | None:
        """The same with bags apart, where the rows of bags are pooled by their hosts; else None."""
        if not self._tables.pools_bags:
            return None
        if any(self.runs_model(batch) for batch in batches):
            raise BadInput(
                "row_compression=dct_mp pools bags where their rows are, and must get the bags of a batch before the "
                "forward pass: pass ids=lambda batch: {table: Bag} to gba_hvd.batches, or use another row_compression"
            )
        return self._tables.bag_lookups([self._ids_of(batch) for batch in batches])

    def _ids_of(self, batch: Any) -> Ids:
        return by_feature(_ids_in(batch) if self._ids is None else self._ids(batch))

    def _recorded(self, batch: Any) -> list[list[np.ndarray]]:
        length = self._length[self._model.training]
        with _buffers_unchanged(self._model), self._tables.recording(length.stop_after) as recorder:
            try:
                (self._forward or self._model)(batch)
                length.saw_complete(recorder.n_lookups)
            except AllRecorded:
                pass
            except GbaError:
                raise
            except Exception as error:  # of any kind: it is the user's model
                raise BadInput(
                    "with several hosts, rows are fetched before the loop computes a batch, so the forward pass was "
                    f"run on a {type(batch).__name__} to find its ids, and failed ({type(error).__name__}: {error}). "
                    "Tell gba_hvd.batches and evaluate how your loop calls the model, forward=lambda batch: "
                    "model(...), or where the ids are, ids=lambda batch: {table: ids}"
                ) from error
        if not recorder.n_lookups:
            raise BadInput(
                f"the forward pass of a {type(batch).__name__} looked up no row, so there is nothing to train in the "
                "tables: `forward` must call the model that looks up in them, as your loop does"
            )
        return recorder.keys


def _ids_in(batch: Any) -> Any:
    """A batch's attribute `ids`, or its entry "ids"; None where it has neither."""
    return batch.get("ids") if isinstance(batch, Mapping) else getattr(batch, "ids", None)


@contextlib.contextmanager
def _buffers_unchanged(model: nn.Module) -> Iterator[None]:
    held = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in held:
                buffer.copy_(before)
                module._buffers[name] = buffer
