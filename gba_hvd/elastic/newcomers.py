"""Letting newcomers in beside the training, in an asynchronous mode; and being one.

    survivor   its thread (`reform`) forms the world anew, meets the newcomers there, and leaves word for the training
               thread, which tells the callbacks when it comes by
    newcomer   meets these threads before its training, takes over what a survivor kept from the start of the epoch, and
               from then on is a survivor, too

Both run the same collectives in the same order: `membership.join`, the snapshot, residuals where gradients are
compressed. A crash in between breaks up the new world for all, and they form the next one; the training goes on.
"""

from __future__ import annotations

from gba_hvd import membership
from gba_hvd.collectives import World
from gba_hvd.elastic import telling
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.engine import Engine
from gba_hvd.errors import GbaError
from gba_hvd.gba import GbaMode
from gba_hvd.launcher import Seat
from gba_hvd.membership import Joined
from gba_hvd.reform import Reformer
from recovery import state_codec


class Newcomers:
    """One worker's part. Belongs to the training thread, all but `_meet`, which adds to `_met` only."""

    def __init__(self, engine: Engine, state: TrainingState, seat: Seat) -> None:
        self._engine, self._state, self._seat = engine, state, seat
        # By the background thread, for the training thread; last, workers that are gone, and the residuals they had.
        self._met: list[tuple[Joined, World, tuple[int, float | None] | None]] = []

    def watch(self, number: int = 0) -> None:
        """An asynchronous mode is on: from now on the world is formed anew beside the training.

        number: the change of membership that the present world stands for.
        """
        engine = self._engine
        assert isinstance(engine.mode, GbaMode)
        if engine.reformer is None:
            engine.reformer = Reformer(engine.mode, number, self._meet, self._seat, engine.tables.config.server_s)
            engine.reformer.start()

    def tell(self) -> None:
        """Tell the callbacks what changed meanwhile."""
        engine = self._engine
        while self._met:
            joined, world, lost = self._met.pop(0)
            before = engine.world.size
            engine.world = world
            if engine.checkpoints is not None:
                engine.checkpoints.world_formed(rows_moved=False)
            engine.restarts += 1
            telling.world_formed(engine, joined, before)
            if lost is not None:
                telling.residuals_lost(engine, *lost)

    def _meet(self, world: World) -> int:
        """A survivor's part, in the background."""
        engine, state = self._engine, self._state
        joined = membership.join(engine, world, engine.job_id, True)
        if not joined.asynchronous:
            raise GbaError("the others have left the asynchronous mode")
        world.broadcast("snapshot", state.snapshot if world.rank == joined.source else None, joined.source)
        lost = None if engine.compression is None else engine.compression.count_lost(world, True)
        self._met.append((joined, world, lost))
        if isinstance(engine.mode, GbaMode):
            engine.mode.contact.rank = world.rank  # last: from then on the servers count on it
        return joined.membership

    def come_in(self, joined: Joined) -> None:
        """A newcomer's part, before its training."""
        engine, world = self._engine, self._engine.world
        self._state.snapshot = world.broadcast("snapshot", None, joined.source)
        state = state_codec.decode(self._state.snapshot)
        self._state.load_state_dict(state)
        if engine.compression is not None:
            engine.compression.clear()  # whoever was here before was counted as lost
            engine.compression.count_lost(world, False)
        if engine.checkpoints is not None:
            engine.checkpoints.load_state(state["checkpoints"])
            engine.checkpoints.world_formed(rows_moved=False)
