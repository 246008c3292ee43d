"""The thread of a worker that does nothing but synchronise its replica with the others'.

    turn -> copy of the replica -> sum over the workers, or the servers' central copy -> mixed in

Who owns what. This thread alone talks to Horovod about rounds and keeps the global copy of bmuf; the replica has a lock
of its own (`replica`), held for the copy and for the mixing; `_changed` guards the flags that other threads set. The
training thread is waited for by nobody in here, and waits for a round only where `every` says so.

A round of ma and bmuf is one allreduce of every worker's thread. With the replica go four numbers: whether it counts (a
closed one does not), whether this worker would like to stop, and two for the spread. Since all see the same sums, all
stop after the same round. Worlds come and go (`reform`): `world_ends` returns when this thread is out of Horovod, the
round under way is dropped and counted, and the next one waits for `world_stands`. What each crash leaves behind:

    this worker, before the allreduce ended    the others' round fails, and is dropped
    after it                                   nothing: all have the result, each mixes it in for itself
    rank 0, before it published the result     the servers' copy is a round old
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

from gba_hvd.averaging import Averaging, global_copy_
from gba_hvd.collectives import World, WorldLeft
from gba_hvd.replica import Copy, Replica, is_finite

log = logging.getLogger("gba_hvd")
_OPEN, _STOP, _SQUARES, _N_SQUARES = range(4)  # the numbers that travel with a replica
_N_NUMBERS = 4
_OF_A_CORE = 0.1  # what background rounds may take of one
_QUIET_S = 1.0  # a worker that is alone lets the servers have its replica so often
_PASSIVE_AFTER_S = 0.2  # without a micro-batch for so long, a worker takes part in others' foreground rounds
_LONG_MICRO_S = 10.0  # in the middle of a micro-batch of this length it takes part as well
_AFTER_A_FAILURE_S, _ASK_AGAIN_S = 0.5, 10.0
_LEAVE_S = 10.0
_KEPT = 64


class Central(Protocol):
    """The copy that the servers hold."""

    def blend(self, copy: Copy, number: int) -> Tensor:
        """Blend a replica into it; returns what it is then, float32 [n]. number: grows with each of a worker."""

    def publish(self, copy: Copy, values: Tensor) -> None:
        """Overwrite it, unless the job is past the copy's phase."""


@dataclass(frozen=True)
class RoundsTold:
    """What became of the rounds since the last telling.

    spread: RMS distance of replicas from their mean; for easgd, of this worker's from the central copy
    """

    rounds_per_s: float
    seconds_per_round: float
    steps_per_round: float
    spread: float
    rounds_dropped: int  # so far


class Rounds:
    """Start with `start(world)`; `stop()` may be called twice.

    broken: called with a sentence when no round can come any more in this world. diverged: called when the replica is
    not finite any more; it is given to nobody.
    n_done: rounds that ended well; n_failed: those that were dropped.
    """

    def __init__(
        self, averaging: Averaging, replica: Replica, central: Central, *, broken: Callable[[str], None],
        diverged: Callable[[], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._averaging, self._replica, self._central = averaging, replica, central
        self._broken, self._diverged, self._clock = broken, diverged, clock
        self._changed = threading.Condition()
        self._world: World | None = None
        self._ending = ""  # "together": after a round in which all say so; "now"
        self._wanted = self._in_horovod = False
        self._idle_since_s = 0.0
        self._lost_s: float | None = None  # when a round failed, until a new world stands
        self._not_before_s = 0.0
        self._global: Tensor | None = None  # of bmuf
        self._squares = (0.0, 0)  # of the last round: this replica's squared distance, over how many numbers
        self._steps_then = 0
        self.n_done = self.n_failed = 0
        self._seconds: deque[float] = deque(maxlen=_KEPT)
        self._steps: deque[int] = deque(maxlen=_KEPT)
        self._spread = 0.0
        self._told = (clock(), 0)
        self._dropped: list[str] = []
        self._thread = threading.Thread(target=self._run, name="gba-hvd rounds", daemon=True)

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self, world: World) -> None:
        self._world, self._idle_since_s = world, self._clock()
        self._thread.start()

    def stop(self, together: bool = False, timeout_s: float = _LEAVE_S) -> bool:
        """together: after a round in which every worker wants to stop, so that none is left waiting in Horovod.

        Returns whether the thread has ended in time; if not, the world has to be formed anew before it is used again.
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

    def world_ends(self, timeout_s: float = _LEAVE_S) -> None:
        """From another thread, before Horovod is shut down: returns when this thread is out of it."""
        if not self._averaging.is_collective:
            return  # rounds with the servers go on
        with self._changed:
            self._world = None
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._in_horovod, timeout_s):
                log.warning("the thread of the rounds did not leave Horovod's world in %.0f s", timeout_s)

    def world_stands(self, world: World) -> None:
        with self._changed:
            self._world, self._lost_s = world, None
            self._global, self._squares = None, (0.0, 0)
            self._changed.notify_all()

    @property
    def is_alone(self) -> bool:
        world = self._world
        return world is not None and world.size == 1

    # --- the training thread -----------------------------------------------------------------------------------------

    def begin_micro(self) -> None:
        self._idle_since_s = self._clock() + _LONG_MICRO_S  # see `_is_due`

    def end_micro(self, timeout_s: float) -> None:
        """After a local step. In the foreground every k-th waits for a round, but not for one that fails or is late."""
        self._idle_since_s = self._clock()
        every = self._averaging.every
        if every is None or self._replica.n_steps % every or not self._thread.is_alive():
            return
        with self._changed:
            before, world = self.n_done + self.n_failed, self._world
            if world is None or world.size == 1:
                return
            self._wanted = True
            self._changed.notify_all()

            def over() -> bool:
                return self.n_done + self.n_failed > before or self._world is not world or not self._thread.is_alive()

            if not self._changed.wait_for(over, timeout_s):
                self._dropped.append(f"training goes on: a round was waited for in vain for {timeout_s:.0f} s")

    def dropped(self) -> list[str]:
        """Why rounds were dropped since this was asked last."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def told(self) -> RoundsTold | None:
        """What became of the rounds since this was asked last; None if there were none."""
        (then, before), now, n = self._told, self._clock(), self.n_done
        if n == before or now <= then or not self._steps:
            return None
        self._told = (now, n)
        seconds, steps = list(self._seconds), list(self._steps)
        return RoundsTold(
            (n - before) / (now - then), sum(seconds) / len(seconds), sum(steps) / len(steps), self._spread,
            self.n_failed,
        )  # fmt: skip

    # --- this thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (world := self._await_turn()) is not None:
            began_s, cpu_s = self._clock(), time.thread_time()
            goes_on, failure = True, ""
            try:
                goes_on = self._round(world)
            except WorldLeft:
                failure = "the world was formed anew meanwhile"
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
            took_s, cpu_s = self._clock() - began_s, time.thread_time() - cpu_s
            with self._changed:
                self._in_horovod = self._wanted = False
                if failure:
                    self._note_failure(failure, world)
                else:
                    self._note_done(took_s)
                    rest_s = max(self._averaging.pause_s, (1 / _OF_A_CORE - 1) * cpu_s)
                    is_quiet = world.size == 1 or self._averaging.algorithm == "none"
                    self._not_before_s = self._clock() + (_QUIET_S if is_quiet else rest_s)
                self._changed.notify_all()
            if not goes_on:
                return

    def _await_turn(self) -> World | None:
        """The world of the next round, when its time has come; None: there will be none."""
        with self._changed:
            while True:
                world, now = self._world, self._clock()
                collective = self._averaging.is_collective and world is not None and world.size > 1
                if self._ending == "now" or (self._ending and not collective):
                    return None
                if world is not None and self._is_due(world, now):
                    self._in_horovod = collective
                    return world
                if self._lost_s is not None and now > self._lost_s + _ASK_AGAIN_S and self._replica.is_open:
                    self._lost_s = now
                    self._broken("no round of replicas can be made in this world any more")
                self._changed.wait(self._look_again_s(world, now))

    def _is_due(self, world: World, now: float) -> bool:
        if self._ending:
            return True
        if self._averaging.every is None or world.size == 1:
            return now >= self._not_before_s
        is_idle = not self._replica.is_open or now - self._idle_since_s > _PASSIVE_AFTER_S
        passive = self._averaging.is_collective and is_idle and now >= self._not_before_s
        return self._wanted or passive

    def _look_again_s(self, world: World | None, now: float) -> float:
        if world is not None and (self._averaging.every is None or world.size == 1):
            return max(0.001, self._not_before_s - now)
        return _PASSIVE_AFTER_S / 2

    def _round(self, world: World) -> bool:
        """One round. Returns whether there will be another."""
        averaging, replica = self._averaging, self._replica
        if averaging.is_collective and world.size > 1:
            return self._collective(world)
        copy = self._copied()
        if copy is None or (averaging.algorithm == "none" and world.size > 1):
            return True
        if world.size == 1:
            self._central.publish(copy, copy.values)
        else:
            # Grows through all of the worker's modes and worlds, while its process lives.
            target = self._central.blend(copy, time.monotonic_ns())
            self._measure(copy, target)
            replica.mix_in_(copy, target, averaging.elasticity, averaging.mixing)
        return True

    def _collective(self, world: World) -> bool:
        averaging, copy = self._averaging, self._copied()
        n = self._replica.n
        message = torch.zeros(n + _N_NUMBERS)
        if copy is not None:
            message[:n] = copy.values
        numbers = message[n:]
        numbers[_OPEN], numbers[_STOP] = float(copy is not None), float(self._ending == "together")
        numbers[_SQUARES], numbers[_N_SQUARES] = self._squares
        world.sum_("rounds", message, given_up=lambda: self._world is not world or self._ending == "now")
        with self._changed:
            self._in_horovod = False
            self._changed.notify_all()
        n_open, n_stop = round(float(numbers[_OPEN])), round(float(numbers[_STOP]))
        if numbers[_N_SQUARES] > 0:
            self._spread = float(numbers[_SQUARES] / numbers[_N_SQUARES]) ** 0.5
        self._squares = (0.0, 0)
        if n_open:
            target = mean = message[:n] / n_open
            if averaging.algorithm == "bmuf":
                target = self._global = global_copy_(self._global, mean, averaging.block_rate)
            if copy is not None:
                self._squares = (float((copy.values - mean).square().sum()), n)
                self._replica.mix_in_(copy, target, averaging.elasticity, averaging.mixing)
                self._steps.append(copy.n_steps - self._steps_then)
                self._steps_then = copy.n_steps
                if world.rank == 0:
                    self._publish(copy, target)
        return n_stop < world.size

    def _publish(self, copy: Copy, values: Tensor) -> None:
        """The round is done for all whatever comes of this: the world is as good as before."""
        try:
            self._central.publish(copy, values)
        except Exception as error:
            self.n_failed += 1
            self._dropped.append(f"the servers were not told of its result: {type(error).__name__}: {error}")

    def _copied(self) -> Copy | None:
        copy = self._replica.copy()
        if copy is None or is_finite(copy.values):
            return copy
        self._diverged()
        return None

    def _measure(self, copy: Copy, target: Tensor) -> None:
        if len(target):
            self._spread = float((copy.values - target).square().mean()) ** 0.5
        self._steps.append(copy.n_steps - self._steps_then)
        self._steps_then = copy.n_steps

    def _note_done(self, took_s: float) -> None:
        self.n_done += 1
        self._seconds.append(took_s)

    def _note_failure(self, why: str, world: World) -> None:
        self._not_before_s = self._clock() + _AFTER_A_FAILURE_S
        if self._ending == "now":
            return  # the others may be gone already
        self.n_failed += 1
        self._dropped.append(why)
        if self._averaging.is_collective and world.size > 1 and self._world is world:
            self._world, self._lost_s = None, self._clock()
