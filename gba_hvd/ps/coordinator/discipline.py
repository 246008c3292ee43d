"""How an asynchronous mode hands out micro-batches and makes steps of what comes back."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, get_args

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import BY_NAME, SERVER_MODES, StepOf
from gba_hvd.ps.coordinator.staleness import weighting

StalenessOf = Literal["token", "values"]


@dataclass(frozen=True)
class Discipline:
    """How an asynchronous mode hands out micro-batches and makes steps of what comes back.

    name:      gba     M pushes make a step, weighted by staleness
               bsp     M pushes make a step, all with weight 1
               async   every push is a step
               hop_bs  as async, but no worker runs far ahead of the slowest (bounded staleness)
               hop_bw  one push of every worker makes a step, without waiting for the last ones (backup workers)
               shadow, easgd, ma, bmuf: as async; a push has rows only, since every worker steps a dense replica
    staleness: gba: name of the weighting, see `gba_hvd.ps.coordinator.staleness`
    tolerance: gba: the paper's iota, in steps, for the weightings that have one
    staleness_of: gba: what the weighting goes by. "token", as published: how late the micro-batch is. "values": by how
               many steps the dense values that it was computed with are old; of several servers, the oldest
    lookahead: gba, bsp: hand out micro-batches of at most this many steps ahead; 0 is lock-step, None is no limit
    slack:     hop_bs: a worker more than this many micro-batches ahead of the slowest one waits
    backups:   hop_bw: a round does not wait for this many of the workers; what they push later is dropped

    A setting of another discipline is not used. Raises BadInput.
    """

    name: str = "gba"
    staleness: str = "threshold"
    tolerance: int = 4
    staleness_of: StalenessOf = "token"
    lookahead: int | None = None
    slack: int = 2
    backups: int = 1

    def __post_init__(self) -> None:
        if self.name not in SERVER_MODES:
            near = get_close_matches(str(self.name), SERVER_MODES, n=1) or SERVER_MODES
            raise BadInput(f"there is no asynchronous mode {self.name!r}; did you mean {' or '.join(map(repr, near))}?")
        weighting(self.staleness, self.tolerance)
        if self.staleness_of not in get_args(StalenessOf):
            raise BadInput(f"staleness_of is 'token' or 'values', got {self.staleness_of!r}")
        if self.staleness_of == "values" and self.staleness in ("none", "gap_aware"):
            raise BadInput(
                f"staleness_of='values' has no effect with staleness={self.staleness!r}, which weighs nothing by "
                "steps: leave it out, or choose a weighting such as 'inverse'"
            )
        for setting in ("lookahead", "slack", "backups"):
            value = getattr(self, setting)
            if setting == "lookahead" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                or_none = ", or None" if setting == "lookahead" else ""
                raise BadInput(f"{setting} must be a whole number, 0 or more{or_none}, got {value!r}")

    @property
    def step_of(self) -> StepOf:
        """What a step is made of, see `mode_names.Mode`."""
        found = BY_NAME[self.name].step_of
        assert found is not None
        return found
