"""What a worker logs while it waits for others in an operation of Horovod's, and when.

Horovod waits without end, and over Gloo its stall inspector (0.28.1) takes the world for one of no ranks, of which none
is missing: it never speaks. Here a wait is reported after `FIRST_S`, then ever less often. Who is behind is found in
the launcher's key-value store, in jobs that are not large: a worker that has waited for `MARKED_S` leaves there what it
waits in, and takes it back when the wait is over. So a worker without a mark computes, hangs, waits for another one of
its host, or has come within that time. A wait that is shorter than that costs nothing. Sums in the background have
marks of their own, as the thread that trains may wait elsewhere.

What a crash leaves: a mark of a rank that waits no more, until the launcher forms the next world and empties its store.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from gba_hvd.comm.launcher_slot import LauncherStore
from gba_hvd.comm.wait_notices import Patience

FIRST_S, MARKED_S = 30.0, 10.0
_MOST_WORKERS = 32  # above that, every worker's asking for the mark of each other one would keep the launcher busy
_NOTHING = "-"
_SYNC, _EVALUATION = "the exchange of state before training (state.sync)", "an evaluation (gba_hvd.evaluate)"
_RETRIEVAL, _STEP = "an evaluation of retrieval", "a step of training"
_MODE, _CHECKPOINT = "a change of mode", "a checkpoint"
_RECOVERY, _ROUND = "a recovery from a checkpoint", "a round of replicas"
_CLAIM = "the claim of the checkpoint location, which one worker makes for all"
_BEHIND = (
    "A worker that is behind computes, loads data, or hangs: its log, or `py-spy dump --pid` on its host, shows where"
)
_CLAIMS = "It may wait until the lease of a job ends that did not release its claim there, as its log then says"
_SERVERS = "servers.wait_s="  # and how long a host's leader may wait for its servers before it comes
_AWAITS = (
    "A worker that is behind may be waiting for the companion servers of its host (wait_s={:g}), as its own log then "
    "says"
)
_ENDS = "The wait ends when all have come; Ctrl-C ends the job"
_TRAINS = "Training continues; replicas are not synchronised until all have come"
# What users know operations by. By name, or what comes before its first dot.
PURPOSES = {
    **dict.fromkeys(
        (
            "facts", "settings", "session", "key", "open", "bare", "marks", "reserve", "move", "outboxes", "initialise",
            "fill", "filled", "assigned rows", "read the assigned", "place", "make room for messages in", "refilled",
            "read", "job", "have", "left", "look at what was left in", "servers started", "goes on", "clear",
            "resume from", "state", "snapshot", "clock", "residuals", "group", "group connected", "start",
        ),
        _SYNC,
    ),
    **dict.fromkeys(("recovery", "recovery agreed", "going back", "gone back", "not gone back"), _RECOVERY),
    **dict.fromkeys(("evaluation", "outputs", "scores", "buffers"), _EVALUATION),
    "use": _CLAIM,
    "retrieval": _RETRIEVAL,
    **dict.fromkeys(("commit", "compression", "dense", "rows", "pull", "negatives"), _STEP),
    **dict.fromkeys(("entered", "servers", "mode left", "mode"), _MODE),
    **dict.fromkeys(
        (
            "save", "best", "random", "residual", "checkpoint read", "saved before leaving", "may be as resumed",
            "is as resumed",
        ),
        _CHECKPOINT,
    ),
    **dict.fromkeys(("rounds", "rounds of the global copy", "global copy"), _ROUND),
    **dict.fromkeys(("epoch", "shards"), "the start of an epoch"),
    "reports": "the reports of scores at the end of an epoch",
    "counts": "counting samples (before an epoch)",
    "rows assigned": "setting rows of a table",
}  # fmt: skip
log = logging.getLogger("gba_hvd")


def purpose(name: str) -> str:
    """What an operation of this name is for."""
    return PURPOSES.get(name) or PURPOSES.get(name.partition(".")[0]) or f"the exchange {name!r}"


def who_is_behind(name: str, marks: Mapping[int, str]) -> str:
    """marks: what each of the other ranks is known to wait in; empty: nothing. Returns "" where all wait in `name`."""
    absent = [rank for rank, mark in marks.items() if mark in ("", _NOTHING)]
    elsewhere = {rank: mark for rank, mark in marks.items() if rank not in absent and mark != name}
    found = []
    if absent:
        plural = len(absent) > 1
        found.append(f"rank{'s' * plural} {', '.join(map(str, absent))} {'have' if plural else 'has'} not come to it")
    found += [f"rank {rank} waits in {purpose(mark)} (exchange {mark!r})" for rank, mark in elsewhere.items()]
    return "; ".join(found)


def why_behind(name: str, waited_s: float) -> str:
    """Why a worker may not have come to this operation after so long."""
    if purpose(name) == _CLAIM:
        return _CLAIMS
    if name.startswith(_SERVERS) and waited_s <= (wait_s := float(name.removeprefix(_SERVERS))):
        return _AWAITS.format(wait_s)
    return _BEHIND


class LongWait:
    """One wait of this worker for others. For one thread; raises nothing where the launcher cannot be reached.

    ranks: of all that take part; store: None where there is no launcher to ask; in_background: training does not wait
    for it
    """

    def __init__(
        self, name: str, rank: int, ranks: Sequence[int], store: LauncherStore | None, in_background: bool = False
    ) -> None:
        self._name, self._rank, self._ranks, self._in_background = name, rank, ranks, in_background
        self._store = store if len(ranks) <= _MOST_WORKERS else None
        self._patience = Patience(first_s=FIRST_S)
        self._patience.word(True, 0.0)
        self._mark(name)

    def report(self, waited_s: float) -> None:
        """Log how long this worker has waited so far, if that is due."""
        if self._patience.word(True, waited_s) is None:
            return
        found = self._behind()
        log.warning(
            "rank %d has waited for %.0f s in %s: %s. %s. %s",
            self._rank, waited_s, purpose(self._name), found or "not all workers have come to it",
            why_behind(self._name, waited_s), _TRAINS if self._in_background else _ENDS,
        )  # fmt: skip

    def end(self) -> None:
        """The wait is over, also by an error of Horovod's. Not called where this process ends."""
        self._mark(_NOTHING)

    def _mark(self, what: str) -> None:
        if self._store is not None:
            try:
                self._store.ask("PUT", self._path(self._rank), what.encode())
            except OSError:
                self._store = None  # nor is it asked: who is behind is not known, and the line says less

    def _behind(self) -> str:
        if self._store is None:
            return ""
        others = [rank for rank in self._ranks if rank != self._rank]
        try:
            return who_is_behind(self._name, {rank: self._store.ask("GET", self._path(rank)) or "" for rank in others})
        except OSError:
            return ""

    def _path(self, rank: int) -> str:
        return f"/gba_hvd_waits/{rank}{'-background' * self._in_background}"
