"""How far its job was in the data when a checkpoint was saved: what the manifest has about it, and the checkpoint to go
back to where an epoch is to be trained from its first batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from recovery.format.manifest import Manifest

POSITION = "position"  # in what a manifest has about its job


@dataclass(frozen=True)
class EpochPosition:
    """Steps done of an epoch, or of one segment of it.

    n_steps: of the epoch, or of the segment; n_segments: of the epoch; 0: not known
    """

    epoch: int
    steps_done: int
    n_steps: int = 0
    segment: int = 0
    n_segments: int = 1

    @property
    def is_complete(self) -> bool:
        return 0 < self.n_steps <= self.steps_done and self.segment + 1 == self.n_segments

    @property
    def words(self) -> str:
        if self.is_complete:
            return f"epoch {self.epoch}, complete"
        segments = f" of {self.n_segments}" if self.n_segments else ""
        where = f", segment {self.segment + 1}{segments}" if self.segment or self.n_segments > 1 else ""
        steps = f" of {self.n_steps:,}" if self.n_steps else ""
        return f"epoch {self.epoch}{where}, {self.steps_done:,}{steps} steps"


def position_of(manifest: Manifest) -> EpochPosition | None:
    """None where the manifest has none that makes sense."""
    try:
        return msgspec.convert(manifest.about.get(POSITION), EpochPosition)
    except msgspec.ValidationError:
        return None


def newest_before(found: Iterable[Manifest], epoch: int) -> tuple[Manifest, EpochPosition] | None:
    """The newest checkpoint in which nothing of this epoch was trained. found: newest first"""
    for one in found:
        position = position_of(one)
        if position is not None and (position.epoch, position.segment, position.steps_done) <= (epoch, 0, 0):
            return one, position
    return None
