"""Admits late joiners beside the training, in an asynchronous mode; and joins late.

    survivor   its thread (`world_rejoin`) forms the world with the late joiners, and leaves a note for the training
               thread, which reports it to the callbacks before its next micro-batch
    joiner     meets these threads before its training, takes over what a survivor stored at the start of the epoch, and
               from then on is a survivor, too

Both run the same collectives in the same order: `membership.join`, the snapshot, residuals where gradients are
compressed. A crash in between breaks up the new world for all, and they form the next one; the training continues.
"""

from __future__ import annotations

from gba_hvd import membership
from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.comm import world_formation
from gba_hvd.comm.collectives import World
from gba_hvd.comm.launcher_slot import LauncherSlot
from gba_hvd.elastic import endings, job_events
from gba_hvd.elastic.training_state import TrainingState
from gba_hvd.elastic.world_rejoin import WorldRejoin
from gba_hvd.errors import GbaError
from gba_hvd.membership import JoinResult
from gba_hvd.shm.process_state import is_alive
from gba_hvd.training.engine import Engine
from recovery import state_codec


class LateJoiners:
    """One worker's part. Belongs to the training thread, all but `_meet`, which adds to `_met` only."""

    def __init__(self, engine: Engine, state: TrainingState, slot: LauncherSlot) -> None:
        self._engine, self._state, self._slot = engine, state, slot
        # By the background thread, for the training thread: workers that are gone and the residuals they had; how long
        # the world took to form; the other workers of this host before, by rank.
        self._met: list[
            tuple[JoinResult, World, tuple[int, float | None] | None, world_formation.Wait | None, dict[int, int]]
        ] = []

        self._reported_gone = False

    def start_rejoin(self, number: int = 0) -> None:
        """An asynchronous mode is on: from now on worlds are formed beside the training.

        number: the change of membership that the present world stands for.
        """
        engine, mode = self._engine, self._engine.mode
        assert mode is not None and mode.servers is not None
        if mode.rejoin is None:
            patience_s = engine.model.tables.config.server_timeout_s
            rejoin = WorldRejoin(mode.servers, number, self._meet, self._slot, patience_s, engine.forming)
            mode.rejoin = rejoin
            rejoin.start()

    def report(self) -> None:
        """Report to the callbacks what changed meanwhile."""
        engine = self._engine
        while self._met:
            joined, world, lost, wait, neighbours = self._met.pop(0)
            before = engine.world.size
            engine.world = world
            if (checkpoints := checkpoints_of(engine)) is not None:
                checkpoints.world_formed(rows_moved=False)
            engine.progress.world_formed(joined.workers, is_restart=True)
            engine.reports.n_working = None
            job_events.world_formed(engine, joined, before)
            if lost is not None:
                job_events.residuals_lost(engine, *lost)
            job_events.world_was_late(engine, wait, "those that were there continued to train")
            for event in endings.failed_neighbours(engine, neighbours):
                engine.emit(event, only_here=True)

    def report_wait(self) -> None:
        """In an asynchronous mode: that a world is formed without a worker of this host, and that it takes long."""
        engine = self._engine
        if engine.forming.wait() is None:
            self._reported_gone = False
        elif not self._reported_gone and not all(map(is_alive, engine.host.neighbours.values())):
            self._reported_gone = True
            job_events.worker_gone(engine)
        if (wait := engine.forming.word()) is not None:
            engine.emit(
                world_formation.still_forms(
                    engine.progress.step, wait, "training continues with the workers that are there"
                )
            )

    def _meet(self, world: World) -> int:
        """A survivor's part, in the background."""
        engine, state, neighbours = self._engine, self._state, self._engine.host.neighbours
        joined = membership.join(engine, world, engine.job.id, True)
        if not joined.asynchronous:
            raise GbaError("the others have left the asynchronous mode")
        world.broadcast("snapshot", state.snapshot if world.rank == joined.source else None, joined.source)
        state.meet_clocks(world, joined.source)
        lost = None if engine.model.compression is None else engine.model.compression.count_lost(world, True)
        self._met.append((joined, world, lost, engine.forming.end(), neighbours))
        if engine.mode is not None and engine.mode.servers is not None:
            engine.mode.servers.contact.rank = world.rank  # last: from then on the servers count on it
        return joined.membership

    def join_running_mode(self, joined: JoinResult) -> None:
        """A late joiner's part, before its training."""
        engine, world = self._engine, self._engine.world
        self._state.snapshot = world.broadcast("snapshot", None, joined.source)
        _, engine.progress.launched_unix_s = self._state.meet_clocks(world, joined.source)
        state = state_codec.decode(self._state.snapshot)
        self._state.load_state_dict(state)
        engine.progress.world_formed(joined.workers, is_restart=True)
        engine.rollback.load(state["rollback"])
        engine.reports.pauses.load_state_dict(state["pauses"], with_open=False)
        engine.progress.n_reported = state["n_reported"]
        if engine.model.compression is not None:
            engine.model.compression.clear()  # workers that were here before were counted as lost
            engine.model.compression.count_lost(world, False)
        if (checkpoints := checkpoints_of(engine)) is not None:
            checkpoints.load_state(state["checkpoints"])
            checkpoints.world_formed(rows_moved=False)
