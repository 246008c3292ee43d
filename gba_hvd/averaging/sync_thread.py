"""The thread of a worker that does nothing but synchronise its replica with the others'.

    `schedule.next_action` -> copy of the replica -> sum over the workers, or the servers' central copy -> mixed in

Who owns what. This thread alone talks to Horovod about rounds and keeps the global copy of bmuf; the replica has a lock
of its own (`replica`), held for the copy and for the mixing; `_changed` guards the flags that other threads set. The
training threads (one, or those of `hogwild`) are never waited for in here, and wait for a round only where `every`
says so.

A round of ma and bmuf is one allreduce of every worker's thread. With the replica go some numbers: of each rank whether
its replica counts (a closed one does not; the first of those that do sends the servers the result), whether this
worker would like to stop, and two for the spread. Since all see the same sums, all stop after the same round. Worlds
come and go (`Rejoin`): `before_world_leaves` returns when this thread is out of Horovod, the round in flight is dropped
and counted, and the next one waits for `after_world_forms`. What each crash leaves behind:

    this worker, before the allreduce ended    the others' round fails, and is dropped
    after it                                   nothing: all have the result, each mixes it in for itself
    who updates the servers, before it did     their copy is a round old
    a server, while it blends                  its copy is as before or after; asked again, it may blend twice
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gba_hvd.averaging.algorithms import Averaging, bmuf_update_
from gba_hvd.averaging.replica import Replica, ReplicaSnapshot, is_finite
from gba_hvd.averaging.schedule import LONG_MICRO_S, SyncView, is_collective, next_action
from gba_hvd.comm.collectives import World, WorldLeft
from gba_hvd.comm.traffic import Traffic, ring

log = logging.getLogger("gba_hvd")
_STOP, _SQUARES, _N_SQUARES = range(3)  # the numbers that travel with a replica; then of each rank, whether its counts
_N_NUMBERS = 3
_OF_A_CORE = 0.1  # what background rounds may take of one
_QUIET_S = 1.0  # a worker that is alone lets the servers have its replica so often
_AFTER_A_FAILURE_S = 0.5
_LEAVE_S = 10.0
_KEPT = 64


class CentralCopyClient(Protocol):
    """The copy that the servers hold."""

    def blend(self, copy: ReplicaSnapshot, number: int) -> Tensor:
        """Blend a replica into it; returns what it is then, float32 [n]. number: grows with each of a worker."""

    def publish(self, copy: ReplicaSnapshot, values: Tensor) -> None:
        """Overwrite it, unless the job is past the copy's phase."""


@dataclass(frozen=True)
class SyncMetrics:
    """Metrics of the rounds since the last report.

    spread:        RMS distance of replicas from their mean; for easgd, of this worker's from the central copy
    useless_waits: how often training waited for a round that did not end in time; nothing was dropped

    The first four are None where none that had this replica in it ended well.
    """

    rounds_per_s: float | None
    seconds_per_round: float | None
    steps_per_round: float | None
    spread: float | None
    rounds_dropped: int  # so far
    useless_waits: int


class SyncThread:
    """Start with `start(world)`; `stop()` may be called twice.

    broken: called with a sentence when no round can come any more in this world. diverged: called when the replica is
    not finite any more; no worker receives it.
    n_done: rounds that ended well, also without this replica; n_failed: those that were dropped, or not reported to
    the servers.
    """

    def __init__(
        self, averaging: Averaging, replica: Replica, central: CentralCopyClient, *, broken: Callable[[str], None],
        diverged: Callable[[], None], traffic: Traffic | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._averaging, self._replica, self._central = averaging, replica, central
        self._broken, self._diverged, self._clock = broken, diverged, clock
        self._traffic = traffic or Traffic()
        self._changed = threading.Condition()
        self._world: World | None = None
        self._ending = ""  # "together": after a round in which all want to stop; "now"
        self._round_requested = self._in_horovod = False
        self._n_begun = self._n_waiting = 0  # micro-batches being computed; threads that wait for a round
        self._idle_since_s = 0.0
        self._lost_s: float | None = None  # when a round failed, until a new world stands
        self._not_before_s = 0.0
        self._global: Tensor | None = None  # of bmuf: from the initial model on
        self._n_global = 0  # rounds that are in it
        self._global_is_common = False  # all workers of this world have the same
        self._squares = (0.0, 0)  # of the last round: this replica's squared distance, over how many numbers
        self._steps_then = 0
        self.n_done = self.n_failed = 0
        self._n_own = 0  # of those that ended well, how many had this replica in them
        self._seconds: deque[float] = deque(maxlen=_KEPT)  # of these
        self._steps: deque[int] = deque(maxlen=_KEPT)
        self._spread = 0.0
        self._had_part = False  # this replica was in the round
        self._reported = (clock(), 0, 0)  # when, and n_own and n_failed then
        self._dropped: list[str] = []
        self._n_useless_waits = 0  # since the last report
        self._thread = threading.Thread(target=self._run, name="gba-hvd rounds", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, world: World) -> None:
        self._world, self._idle_since_s = world, self._clock()
        self._thread.start()

    def stop(self, together: bool = False, timeout_s: float = _LEAVE_S) -> bool:
        """together: after a round in which every worker wants to stop, so that none is left waiting in Horovod.

        Returns whether the thread has ended in time and no round of its was lost; if not, the world has to be formed
        again before training uses it, on all workers (`ReplicaWorker.all_left_together`).
        """
        with self._changed:
            self._ending = "now" if not together or self._ending == "now" else "together"
            self._changed.notify_all()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return self._lost_s is None
        with self._changed:
            self._ending = "now"
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return False

    def before_world_leaves(self, timeout_s: float = _LEAVE_S) -> None:
        """From another thread, before Horovod is shut down: returns when this thread is out of it."""
        if not self._averaging.is_collective:
            return  # rounds with the servers continue
        with self._changed:
            self._world = None
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._in_horovod, timeout_s):
                log.warning("the thread of the rounds did not leave Horovod's world in %.0f s", timeout_s)

    def after_world_forms(self, world: World) -> None:
        with self._changed:
            self._world, self._lost_s = world, None
            self._global_is_common, self._squares = False, (0.0, 0)
            self._changed.notify_all()

    @property
    def are_collective(self) -> bool:
        """Whether rounds are made in Horovod's world, by all workers together."""
        return self._averaging.is_collective

    @property
    def single_worker(self) -> bool:
        world = self._world
        return world is not None and world.size == 1

    # --- the training thread -----------------------------------------------------------------------------------------

    def begin_with(self, values: Tensor) -> None:
        """A replica opens with these values of the servers, [n]: the first ones are the global copy of bmuf.

        Those of a late joiner are of the newest round, since the servers have the global copy then.
        """
        with self._changed:
            if self._averaging.algorithm == "bmuf" and self._global is None:
                self._global = values.clone()

    def none_begun(self) -> None:
        """An epoch starts: unfinished micro-batches of the one before do not count."""
        with self._changed:
            self._n_begun = 0

    def begin_micro(self) -> None:
        with self._changed:
            self._n_begun += 1
            self._idle_since_s = self._clock() + LONG_MICRO_S  # see `schedule.SyncView`

    def end_micro(self, step: int | None, timeout_s: float) -> None:
        """After a local step, the replica's `step`-th (None: its gradient was refused, there was none).

        In the foreground every k-th waits for a round, but not for one that fails or is late. Other threads of the same
        replica that end a micro-batch meanwhile wait as well.
        """
        every = self._averaging.every
        with self._changed:
            self._n_begun = max(0, self._n_begun - 1)
            if not self._n_begun:
                self._idle_since_s = self._clock()
            before, world = self.n_done + self.n_failed, self._world
            if every is None or step is None or world is None or world.size == 1 or not self._thread.is_alive():
                return
            if step % every and not self._n_waiting:
                return
            self._round_requested = True
            self._n_waiting += 1
            self._changed.notify_all()

            def over() -> bool:
                return self.n_done + self.n_failed > before or self._world is not world or not self._thread.is_alive()

            try:
                if not self._changed.wait_for(over, timeout_s):
                    self._n_useless_waits += 1
            finally:
                self._n_waiting -= 1

    def dropped(self) -> list[str]:
        """Why rounds were dropped since this was asked last."""
        with self._changed:
            dropped, self._dropped = self._dropped, []
        return dropped

    def drain_metrics(self) -> SyncMetrics | None:
        """Metrics of the rounds since the last call; None if there were none, and none was waited for."""
        with self._changed:
            (then, own, failed), now = self._reported, self._clock()
            ended_well = self._n_own > own
            if now <= then or not (ended_well or self.n_failed > failed or self._n_useless_waits):
                return None
            self._reported = (now, self._n_own, self.n_failed)
            useless_waits, self._n_useless_waits = self._n_useless_waits, 0
            if not ended_well:
                return SyncMetrics(None, None, None, None, self.n_failed, useless_waits)
            return SyncMetrics(
                (self._n_own - own) / (now - then), sum(self._seconds) / len(self._seconds),
                sum(self._steps) / len(self._steps), self._spread, self.n_failed, useless_waits,
            )  # fmt: skip

    # --- this thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (world := self._await_turn()) is not None:
            began_s, cpu_s = self._clock(), time.thread_time()
            continues, failure, self._had_part = True, "", False
            try:
                continues = self._round(world)
            except WorldLeft:
                failure = "the world was formed again meanwhile"
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            took_s, cpu_s = self._clock() - began_s, time.thread_time() - cpu_s
            with self._changed:
                self._in_horovod = self._round_requested = False
                if failure:
                    self._note_failure(failure, world)
                else:
                    self.n_done += 1
                    if self._had_part:
                        self._n_own += 1
                        self._seconds.append(took_s)
                    rest_s = max(self._averaging.pause_s, (1 / _OF_A_CORE - 1) * cpu_s)
                    is_quiet = world.size == 1 or self._averaging.algorithm == "none"
                    self._not_before_s = self._clock() + (_QUIET_S if is_quiet else rest_s)
                self._changed.notify_all()
            if not continues:
                return

    def _await_turn(self) -> World | None:
        """The world of the next round, when its time has come; None: there will be none."""
        with self._changed:
            while True:
                world, now = self._world, self._clock()
                n_workers = 0 if world is None else world.size
                standing = SyncView(
                    n_workers, self._ending, self._round_requested, self._replica.is_open, self._idle_since_s,
                    self._not_before_s, self._lost_s,
                )  # fmt: skip
                act, look_again_s = next_action(now, standing, self._averaging)
                if act == "end":
                    return None
                if act == "round":
                    self._in_horovod = is_collective(n_workers, self._averaging)
                    return world
                if act == "ask for a world":
                    self._lost_s = now
                    self._broken("no round of replicas can be made in this world any more")
                else:
                    self._changed.wait(look_again_s)

    def _round(self, world: World) -> bool:
        """One round. Returns whether there will be another."""
        averaging, replica = self._averaging, self._replica
        if is_collective(world.size, averaging):
            return self._collective(world)
        copy = self._copied()
        if copy is None or (averaging.algorithm == "none" and world.size > 1):
            return True
        if world.size == 1:
            self._central.publish(copy, copy.values)
            if averaging.algorithm == "bmuf":  # late joiners begin with it, too
                self._global, self._n_global = copy.values.clone(), self._n_global + 1
        else:
            # Grows through all of the worker's modes and worlds, while its process lives.
            target = self._central.blend(copy, time.monotonic_ns())
            if len(target):
                self._spread = float((copy.values - target).square().mean()) ** 0.5
            self._note_steps(copy)
            replica.mix_in_(copy, target, averaging.elasticity, averaging.mixing)
        return True

    def _collective(self, world: World) -> bool:
        averaging, copy = self._averaging, self._copied()
        n = self._replica.n
        message = torch.zeros(n + _N_NUMBERS + world.size)
        if copy is not None:
            message[:n] = copy.values
        numbers, is_open = message[n : n + _N_NUMBERS], message[n + _N_NUMBERS :]
        is_open[world.rank], numbers[_STOP] = float(copy is not None), float(self._ending == "together")
        numbers[_SQUARES], numbers[_N_SQUARES] = self._squares
        world.sum_("rounds", message, cancelled=lambda: self._world is not world or self._ending == "now")
        self._traffic.both("dense", ring(4 * n, world.size))
        self._traffic.both("header", ring(4 * (_N_NUMBERS + world.size), world.size))
        if averaging.algorithm == "bmuf" and not self._global_is_common:
            self._share_global(world)
        with self._changed:
            self._in_horovod = False
            self._changed.notify_all()
        opened, n_stop = is_open.nonzero().flatten().tolist(), round(float(numbers[_STOP]))
        if numbers[_N_SQUARES] > 0:
            self._spread = float(numbers[_SQUARES] / numbers[_N_SQUARES]) ** 0.5
        self._squares = (0.0, 0)
        if opened:
            target = mean = message[:n] / len(opened)
            if averaging.algorithm == "bmuf":
                assert self._global is not None, "a replica is open"
                target = self._global = bmuf_update_(self._global, mean, averaging.block_rate)
                self._n_global += 1
            if copy is not None:
                self._squares = (float((copy.values - mean).square().sum()), n)
                self._replica.mix_in_(copy, target, averaging.elasticity, averaging.mixing)
                self._note_steps(copy)
                if world.rank == opened[0]:
                    self._publish(copy, target)
        return n_stop < world.size

    def _share_global(self, world: World) -> None:
        """All take the global copy that has most rounds in it, of the first rank that has it. A part of a round."""
        rounds, values = torch.zeros(world.size), torch.zeros(self._replica.n)
        with self._changed:
            mine = self._global
        if mine is not None:
            rounds[world.rank] = 1 + self._n_global
        cancelled = lambda: self._world is not world or self._ending == "now"  # noqa: E731
        world.sum_("rounds of the global copy", rounds, cancelled=cancelled)
        whose = int(rounds.argmax())
        if not rounds[whose]:
            return  # no replica was opened yet
        if whose == world.rank and mine is not None:
            values.copy_(mine)
        world.sum_("global copy", values, cancelled=cancelled)
        self._traffic.both("dense", ring(4 * len(values), world.size))
        self._traffic.both("header", ring(4 * world.size, world.size))
        with self._changed:
            self._global, self._n_global, self._global_is_common = values, round(float(rounds[whose])) - 1, True

    def _publish(self, copy: ReplicaSnapshot, values: Tensor) -> None:
        """Not fatal: every rank has completed the round, so the world stays usable."""
        try:
            self._central.publish(copy, values)
        except Exception as error:
            with self._changed:
                self.n_failed += 1
                self._dropped.append(f"its result did not reach the servers: {type(error).__name__}: {error}")

    def _copied(self) -> ReplicaSnapshot | None:
        copy = self._replica.copy()
        if copy is None or is_finite(copy.values):
            return copy
        self._diverged()
        return None

    def _note_steps(self, copy: ReplicaSnapshot) -> None:
        with self._changed:
            self._had_part = True
            self._steps.append(copy.n_steps - self._steps_then)
            self._steps_then = copy.n_steps

    def _note_failure(self, why: str, world: World) -> None:
        self._not_before_s = self._clock() + _AFTER_A_FAILURE_S
        if self._ending == "now":
            return  # the others may be gone already
        self.n_failed += 1
        self._dropped.append(why)
        if is_collective(world.size, self._averaging) and self._world is world:
            self._world, self._lost_s = None, self._clock()
