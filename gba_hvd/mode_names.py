"""The modes: a record of each, with what other parts ask of it, and the names that follow from the records.

Not here: when a mode hands out work and what a gradient counts, which is `ps.coordinator.ledger`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gba_hvd.errors import refuse_unknown

StepOf = Literal["batch", "push", "round"]
_WEIGHTING = frozenset({"staleness", "tolerance", "staleness_of"})
_AVERAGING = frozenset({"elasticity", "mixing"})


@dataclass(frozen=True)
class Mode:
    """What other parts ask of a mode.

    step_of: what servers make a step of: "batch", the M pushes of a global batch; "push", each push; "round", one push
        of each worker that the step waits for. None: there are no servers, workers sum their gradients
    options: arguments of `GBACallback` that this mode uses, without those that all modes with servers use
    has_replicas: each worker steps a replica of the dense part, and pushes rows only
    """

    name: str
    step_of: StepOf | None
    options: frozenset[str] = frozenset()
    has_replicas: bool = False


# Their order is stored, as metrics and commits have a mode's number: a new one comes last.
RECORDS = (
    Mode("allreduce", None),
    Mode("gba", "batch", _WEIGHTING | {"lookahead", "curvature"}),
    Mode("bsp", "batch", frozenset({"lookahead", "curvature"})),
    Mode("async", "push", frozenset({"curvature"})),
    Mode("hop_bs", "push", frozenset({"slack", "curvature"})),
    Mode("hop_bw", "round", frozenset({"backups", "curvature"})),
    Mode("shadow", "push", _AVERAGING | {"sync", "pause_s"}, has_replicas=True),  # in the background
    Mode("easgd", "push", _AVERAGING | {"every"}, has_replicas=True),  # it and the next ones every k local steps
    Mode("ma", "push", _AVERAGING | {"every"}, has_replicas=True),
    Mode("bmuf", "push", _AVERAGING | {"every", "block_rate"}, has_replicas=True),
)
BY_NAME = {mode.name: mode for mode in RECORDS}
MODES = tuple(BY_NAME)
SERVER_MODES = tuple(mode.name for mode in RECORDS if mode.step_of is not None)
REPLICA_MODES = tuple(mode.name for mode in RECORDS if mode.has_replicas)
SHARED_MODES = tuple(name for name in SERVER_MODES if name not in REPLICA_MODES)  # all workers train one dense part
SETTINGS = (*MODES, "auto")  # "auto" is a setting: the job is in allreduce or in gba, as `switching.policy` decides
MODE_NUMBERS = {mode: number for number, mode in enumerate(MODES)}
_SYNONYMS = {  # what papers and other libraries call them
    "sync": "allreduce",
    "synchronous": "allreduce",
    "all_reduce": "allreduce",
    "ddp": "allreduce",
    "asp": "async",
    "asynchronous": "async",
    "ssp": "hop_bs",
    "bounded_staleness": "hop_bs",
    "backup_workers": "hop_bw",
    "shadowsync": "shadow",
    "local_sgd": "ma",
    "model_averaging": "ma",
}


def known_mode(name: str, among: Sequence[str] = SETTINGS) -> str:
    """`name` if it is one of `among`; otherwise BadInput that suggests the right one."""
    refuse_unknown("mode", name, among, _SYNONYMS)
    return name


def any_of(names: Sequence[str]) -> str:
    """The names as a sentence has them: "a, b or c"."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
