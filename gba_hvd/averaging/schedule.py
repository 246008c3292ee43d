"""When a worker's next round of replicas is due: decided here. Waiting for it and making it is `sync_thread`'s.

In the background rounds follow one another, with a pause between. In the foreground (`Averaging.every`) the training
thread asks for them; a worker that has no micro-batch takes part in those of the others, and so does one that has been
computing a single one for very long, so that no worker waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from gba_hvd.averaging.algorithms import Averaging

LONG_MICRO_S = 10.0  # in the middle of a micro-batch of this length a worker takes part in others' foreground rounds
PASSIVE_AFTER_S = 0.2  # and without one for so long
ASK_AGAIN_S = 10.0
_SOON_S = PASSIVE_AFTER_S / 2
_AT_LEAST_S = 0.001


@dataclass(frozen=True)
class SyncView:
    """What the thread of the rounds sees when it looks. Times are seconds on its clock.

    n_workers:       of the world that is formed; 0 where none is
    ending:          "" continues, "together" stops after a round in which all want to stop, "now"
    round_requested: training waits for a round, see `SyncThread`
    is_open:         the replica takes part in rounds
    idle_since_s:    no micro-batch is being computed since then; in the future as long as one is (`LONG_MICRO_S`)
    not_before_s:    end of the pause after the last round
    lost_s:          since when no round can be made in this world, None where one can
    """

    n_workers: int
    ending: str = ""
    round_requested: bool = False
    is_open: bool = True
    idle_since_s: float = 0.0
    not_before_s: float = 0.0
    lost_s: float | None = None


class SyncAction(NamedTuple):
    """What to do now: make a round, end, ask for another world, or wait and look again after so long."""

    act: Literal["round", "end", "ask for a world", "wait"]
    look_again_s: float = 0.0


def is_collective(n_workers: int, averaging: Averaging) -> bool:
    """Whether a round is one of all workers together."""
    return averaging.is_collective and n_workers > 1


def next_action(now: float, standing: SyncView, averaging: Averaging) -> SyncAction:
    """What is due at `now`."""
    collective = is_collective(standing.n_workers, averaging)
    if standing.ending == "now" or (standing.ending and not collective):
        return SyncAction("end")
    if standing.n_workers and _is_due(now, standing, averaging, collective):
        return SyncAction("round")
    if standing.lost_s is not None and now > standing.lost_s + ASK_AGAIN_S and standing.is_open:
        return SyncAction("ask for a world")
    if standing.n_workers and _follows_the_clock(standing, averaging):
        return SyncAction("wait", max(_AT_LEAST_S, standing.not_before_s - now))
    return SyncAction("wait", _SOON_S)


def _is_due(now: float, standing: SyncView, averaging: Averaging, collective: bool) -> bool:
    if standing.ending:
        return True
    has_rested = now >= standing.not_before_s
    if _follows_the_clock(standing, averaging):
        return has_rested
    is_idle = not standing.is_open or now - standing.idle_since_s > PASSIVE_AFTER_S
    return standing.round_requested or (collective and is_idle and has_rested)


def _follows_the_clock(standing: SyncView, averaging: Averaging) -> bool:
    return averaging.every is None or standing.n_workers == 1
