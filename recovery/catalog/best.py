"""Which checkpoint has the best model, by the metric that `CheckpointCallback(keep_best=)` names.

Each manifest has the step at which the model was best until then, by which metric and with what value. The checkpoint
of it is the first one from that step on: it is due at once, and in an asynchronous mode a few steps later.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from recovery.catalog.best_step import best_words
from recovery.catalog.chains import Chain, Skipped
from recovery.catalog.retention import BEST_STEP, best_kept, first_epoch_of
from recovery.errors import Damaged
from recovery.format.manifest import Manifest

BEST_METRIC, BEST_VALUE = "best_metric", "best_value"  # beside BEST_STEP in a manifest; not of older versions


@dataclass(frozen=True)
class BestCheckpoint:
    """manifest: of the checkpoint. step: at which `value` of `metric` was measured, its own step or one before."""

    manifest: Manifest
    step: int
    metric: str = ""
    value: float | None = None

    @property
    def words(self) -> str:
        return best_words(self.metric, self.value, self.step)


def best_checkpoint(manifests: Collection[Manifest]) -> BestCheckpoint | None:
    """Of the run that saved the newest of these manifests; None where it names none, or has not saved it."""
    own = _of_the_newest_run(sorted(manifests, key=lambda one: (one.epoch, one.number)))
    if (found := best_kept(own)) is None:
        return None
    kept, about = found[0], found[1].about
    return BestCheckpoint(kept, about[BEST_STEP], str(about.get(BEST_METRIC, "")), about.get(BEST_VALUE))


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
