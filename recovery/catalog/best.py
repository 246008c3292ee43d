"""Which checkpoint has the best model, by the metric that `CheckpointCallback(keep_best=)` names.

Each manifest has the step at which the model was best until then, by which metric and with what value, and the step of
the next evaluation. The checkpoint of it is the first one from that step on: it is due at once, and in an asynchronous
mode a few steps later. A model that was better than each that was saved is named beside, with the reason.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recovery.catalog.best_step import UnsavedBest, ahead_words, best_words, unsaved_of
from recovery.catalog.chains import Chain, Skipped
from recovery.catalog.retention import BEST_STEP, best_kept, first_epoch_of
from recovery.errors import Damaged
from recovery.format.manifest import Manifest

BEST_METRIC, BEST_VALUE = "best_metric", "best_value"  # beside BEST_STEP in a manifest; not of older versions


@dataclass(frozen=True)
class BestCheckpoint:
    """manifest: of the checkpoint. step: at which `value` of `metric` was measured, its own step or one before.

    unsaved: a model that was better still, and was not saved
    """

    manifest: Manifest
    step: int
    metric: str = ""
    value: float | None = None
    unsaved: UnsavedBest | None = None

    @property
    def words(self) -> str:
        return best_words(self.metric, self.value, self.step)

    @property
    def ahead(self) -> str:
        """How many steps some of its rows are ahead of the model that was measured, in words; empty: none."""
        return ahead_words(self.n_ahead)

    @property
    def n_ahead(self) -> int:
        """The rows of a shard are of the checkpoint's step or a later one."""
        of_rows = (section.step for blob in self.manifest.blobs for section in blob.sections)
        return max(self.manifest.step, *of_rows, self.step) - self.step


def best_checkpoint(manifests: Collection[Manifest]) -> BestCheckpoint | None:
    """Of the run that saved the newest of these manifests; None where it names none, or has not saved it.

    It may have resumed from a checkpoint of another job that names the same best model: that job saved it.
    """
    in_order = sorted(manifests, key=lambda one: (one.epoch, one.number))
    own = _of_the_newest_run(in_order)
    named = {_named(one) for one in own} - {None}
    if (found := best_kept([one for one in in_order if one in own or _named(one) in named])) is None:
        return None
    kept, about = found[0], found[1].about
    namer = _newest_namer(own)
    unsaved = None if namer is None else unsaved_of(dict(namer.about), dict(about))
    return BestCheckpoint(kept, about[BEST_STEP], str(about.get(BEST_METRIC, "")), about.get(BEST_VALUE), unsaved)


def unsaved_best(manifests: Collection[Manifest]) -> UnsavedBest | None:
    """The model that was the best one of that run, and was not saved; None: the best one was, or is yet to be."""
    if (best := best_checkpoint(manifests)) is not None:
        return best.unsaved
    own = _of_the_newest_run(sorted(manifests, key=lambda one: (one.epoch, one.number)))
    namer = _newest_namer(own)
    return None if namer is None else unsaved_of(dict(namer.about), None)


def _named(manifest: Manifest) -> tuple[object, ...] | None:
    """The best model that it names, as no other run will name one."""
    about = manifest.about
    return None if about.get(BEST_VALUE) is None else (about[BEST_STEP], about.get(BEST_METRIC), about[BEST_VALUE])


def best_chain(found: Sequence[Chain | Skipped]) -> BestCheckpoint | None:
    """Of what `chains` found. Raises Damaged where the best one may be among those that are skipped.

    The next one would bear its score.
    """
    best = best_checkpoint([one.newest for one in found if isinstance(one, Chain)])
    if best is not None:
        for one in found:
            if isinstance(one, Skipped) and (one.step is None or best.step <= one.step <= best.manifest.step):
                raise Damaged(f"the checkpoint of the best model ({best.words}) may be a damaged one: {one.words}")
    return best


def _of_the_newest_run(manifests: Sequence[Manifest]) -> list[Manifest]:
    """manifests: oldest first"""
    if not manifests:
        return []
    job = str(manifests[-1].about.get("job", ""))
    first = first_epoch_of(manifests[-1], job)
    return [one for one in manifests if one.epoch >= first and str(one.about.get("job", "")) == job]


def _newest_namer(own: Sequence[Manifest]) -> Manifest | None:
    """The newest one that names a best model. own: oldest first"""
    namers = [one for one in own if one.about.get(BEST_STEP) is not None or UnsavedBest.of(dict(one.about)) is not None]
    return namers[-1] if namers else None
