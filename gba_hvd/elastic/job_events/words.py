"""What several of these reports have."""

from __future__ import annotations

from gba_hvd.membership import JoinResult
from gba_hvd.training.engine import Engine


def mode_of(engine: Engine) -> str:
    return "allreduce" if engine.mode is None else engine.mode.name


def place_of(engine: Engine, joined: JoinResult) -> str:
    return f"{count(engine.world.size, 'worker')} on {count(joined.n_hosts, 'host')}"


def count(n: int, what: str) -> str:
    return f"{n} {what}{'s' if n > 1 else ''}"
