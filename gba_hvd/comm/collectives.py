"""The one file that talks to Horovod: its collectives, and the same for a world of one worker.

Every operation has an explicit name. Horovod numbers unnamed ones per process, and a worker that joins later would
count from zero and never match the others.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import socket
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from gba_hvd.comm import collective_waits, name_lists
from gba_hvd.comm.collective_waits import LongWait
from gba_hvd.comm.launcher_slot import LauncherStore
from gba_hvd.comm.other_launchers import launched_as_one_of_many, refusal
from gba_hvd.comm.world_formation import SLOW, Forming
from gba_hvd.errors import BadInput, GbaError, HorovodMissing, StateMismatch, WorldLost

_POLL_S = 50e-6  # at first; then a twentieth of the time waited so far, so that a long wait takes no core
_PATIENT_POLL_S = 1e-3  # at most, and where training does not wait for the result
_DOZE_S = 0.1  # of a wait that ends by itself: then whether the world is whole
_WATCHED_S = 1.0  # a sum of some workers that takes longer is watched
_ASK_AGAIN_S = 0.5
_LENGTH = 8
_PIECE_BYTES = 1 << 30  # Gloo counts the bytes of a broadcast in 32 bits

_watches = itertools.count()
T = TypeVar("T")
log = logging.getLogger("gba_hvd")


class Alltoall(Protocol):
    """`World.alltoall`, wherever it goes through."""

    def __call__(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]: ...


class WorldLeft(GbaError):
    """An operation was cancelled, because its world is about to be left."""


class World(Protocol):
    """The workers of the job, and what they do together. All ranks call the same methods in the same order."""

    rank: int
    size: int
    local_rank: int
    host: str

    def gather(self, name: str, row: np.ndarray) -> np.ndarray:
        """int64 [n] of every rank as int64 [size, n]; n is the same everywhere."""

    def broadcast(self, name: str, data: bytes | None, root: int) -> bytes:
        """The root's bytes, on every rank."""

    def alltoall(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Send splits[r] float32 words to rank r; returns (words received, in rank order, words from each).

        expected: how many words come from each, where that is known here; on all ranks, or on none
        """

    def gather_bytes(self, name: str, data: bytes) -> list[np.ndarray]:
        """Every rank's bytes, uint8 [n] of its own length each, in rank order."""

    def sum_(self, name: str, values: Tensor, cancelled: Callable[[], bool] | None = None) -> None:
        """Sum over the ranks, in place.

        cancelled: of a sum in the background: called now and then, true raises WorldLeft. Horovod's world must be left
        before an operation of this name comes again.
        """

    def wait_until(
        self, name: str, is_done: Callable[[], bool], doze: Callable[[float], None], ranks: Sequence[int]
    ) -> None:
        """Wait for what some ranks, this one among them, do together elsewhere. Raises where the world has broken.

        doze: returns when it is done, or after so many seconds
        """


class SoloWorld:
    """One worker on its own."""

    rank, size, local_rank = 0, 1, 0

    def __init__(self) -> None:
        self.host = socket.gethostname()

    def gather(self, name: str, row: np.ndarray) -> np.ndarray:
        return row[None, :].copy()

    def broadcast(self, name: str, data: bytes | None, root: int) -> bytes:
        assert data is not None
        return data

    def alltoall(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return words, splits

    def gather_bytes(self, name: str, data: bytes) -> list[np.ndarray]:
        return [np.frombuffer(data, np.uint8)]

    def sum_(self, name: str, values: Tensor, cancelled: Callable[[], bool] | None = None) -> None:
        pass

    def wait_until(
        self, name: str, is_done: Callable[[], bool], doze: Callable[[float], None], ranks: Sequence[int]
    ) -> None:
        raise NotImplementedError("one worker is in no group")


class HorovodWorld:
    """The workers Horovod has initialised. Short-lived: a new one after every re-initialisation."""

    def __init__(self) -> None:
        self._hvd = _horovod()
        self.rank, self.size, self.local_rank = self._hvd.rank(), self._hvd.size(), self._hvd.local_rank()
        self.host = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
        self._watch: Any = None

    def gather(self, name: str, row: np.ndarray) -> np.ndarray:
        mine = torch.from_numpy(row.astype(np.int64))[None, :]
        gathered = self._wait(name, self._hvd.allgather_async(mine, name=f"gba_hvd.{name}"))
        result: np.ndarray = gathered.numpy()
        return result

    def broadcast(self, name: str, data: bytes | None, root: int) -> bytes:
        size = torch.tensor([len(data) if data is not None and self.rank == root else 0], dtype=torch.int64)
        self._wait(name, self._hvd.broadcast_async_(size, root, name=f"gba_hvd.{name}.size"))
        if self.rank == root:
            assert data is not None
            buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        else:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        for piece in buffer.split(_PIECE_BYTES):
            self._wait(name, self._hvd.broadcast_async_(piece, root, name=f"gba_hvd.{name}.bytes"))
        result: bytes = buffer.numpy().tobytes()
        return result

    def alltoall(
        self, name: str, words: np.ndarray, splits: np.ndarray, expected: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        if len(words) >= 2**31:
            raise BadInput(f"{len(words):,} words are too many for one exchange: use a smaller micro_batch")
        counts = torch.from_numpy(splits.astype(np.int32))
        received, received_counts = self._wait(
            name, self._hvd.alltoall_async(torch.from_numpy(words), counts, name=f"gba_hvd.{name}")
        )
        return received.numpy(), received_counts.numpy()

    def gather_bytes(self, name: str, data: bytes) -> list[np.ndarray]:
        # Horovod returns all in one piece and not where the parts begin: each says its length.
        mine = np.frombuffer(len(data).to_bytes(_LENGTH, "little") + data, np.uint8).copy()
        gathered = self._wait(name, self._hvd.allgather_async(torch.from_numpy(mine), name=f"gba_hvd.{name}")).numpy()
        parts, at = [], 0
        for _ in range(self.size):
            end = at + _LENGTH + int.from_bytes(gathered[at : at + _LENGTH].tobytes(), "little")
            parts.append(gathered[at + _LENGTH : end])
            at = end
        return parts

    def sum_(self, name: str, values: Tensor, cancelled: Callable[[], bool] | None = None) -> None:
        local = values.cpu()  # the same tensor on a CPU; our Horovod is built for CPU tensors
        self._wait(name, self._hvd.allreduce_async_(local, op=self._hvd.Sum, name=f"gba_hvd.{name}"), cancelled)
        if local is not values:
            values.copy_(local)

    def wait_until(
        self, name: str, is_done: Callable[[], bool], doze: Callable[[float], None], ranks: Sequence[int]
    ) -> None:
        self._wait_until(name, is_done, self._refuse_broken, ranks, doze=doze)

    def _wait(self, name: str, handle: Any, cancelled: Callable[[], bool] | None = None) -> Any:
        """The result of an operation. Training does not wait for those that may be cancelled."""

        def refuse(_: float) -> None:
            if cancelled is not None and cancelled():  # Horovod keeps the tensors until the next world is initialised
                raise WorldLeft("this worker leaves the world")

        everyone = range(self.size)
        self._wait_until(name, lambda: self._hvd.poll(handle), refuse, everyone, in_background=cancelled is not None)
        return self._hvd.synchronize(handle)

    def _wait_until(
        self,
        name: str,
        is_done: Callable[[], bool],
        refuse: Callable[[float], None],
        ranks: Sequence[int],
        in_background: bool = False,
        doze: Callable[[float], None] | None = None,
    ) -> None:
        """Horovod's own wait spins: it takes the core from whom it waits for.

        refuse: called with the seconds waited so far, may raise; ranks: of all that take part
        doze: see `wait_until`; without it, `is_done` is asked again and again
        """
        asked_s, long_wait = time.perf_counter(), None
        try:
            while not is_done():
                waited_s = time.perf_counter() - asked_s
                refuse(waited_s)
                if waited_s > collective_waits.MARKED_S:
                    long_wait = long_wait or LongWait(name, self.rank, ranks, LauncherStore.of(), in_background)
                    long_wait.report(waited_s)
                if doze is not None:
                    doze(_DOZE_S)
                    continue
                time.sleep(min(max(_POLL_S, waited_s / 20), _PATIENT_POLL_S) if not in_background else _PATIENT_POLL_S)
        finally:
            if long_wait is not None:
                long_wait.end()

    def _refuse_broken(self, waited_s: float) -> None:
        """Raise where Horovod has left the world, which ends all of its operations: also one that no other rank has."""
        if waited_s < _WATCHED_S:
            return
        if self._watch is None:
            # Not the name of an earlier object's, which is there as long as Horovod's world.
            name = f"gba_hvd.watch.{self.rank}.{next(_watches)}"
            self._watch = self._hvd.allreduce_async_(torch.zeros(1), name=name)
        if self._hvd.poll(self._watch):
            raise worker_lost("Horovod has left the world: a worker died, or does not answer")


def current_world() -> World:
    """Horovod's world where it is initialised, a world of one elsewhere.

    Raises HorovodMissing where every worker would train alone: under `horovodrun` when `hvd.init()` was not called, and
    under srun, mpirun or torchrun, which start several processes that Horovod knows nothing of.
    """
    initialised = "horovod.torch" in sys.modules and _horovod().is_initialized()
    if initialised and (world := HorovodWorld()).size > 1:
        return world
    if (found := launched_as_one_of_many(os.environ)) is not None:
        raise HorovodMissing(refusal(found))
    if not initialised and "HOROVOD_RANK" in os.environ:
        raise HorovodMissing(
            "this worker was started by horovodrun, but Horovod is not initialised: call hvd.init() first"
        )
    return SoloWorld()


def initialise_again(forming: Forming, patience_s: float = 0.0) -> None:
    """Leave Horovod's world and wait for the next one, which is reported to `forming`.

    A worker that dies while the world forms breaks it up for all, and the launcher forms another: for `patience_s` this
    worker asks for its place again. Raises what Horovod does when none was formed then.
    """
    hvd, deadline = _horovod(), time.monotonic() + patience_s
    forming.begin()
    while True:
        hvd.shutdown()
        try:
            hvd.init()
            return
        except ValueError as error:
            if time.monotonic() > deadline:
                raise
            forming.broke_up(error)
            log.warning("the world broke up while it formed (%s): asking for a place in the next one. %s", error, SLOW)
            time.sleep(_ASK_AGAIN_S)


def _horovod() -> Any:
    try:
        import horovod.torch as hvd
    except ImportError as error:
        raise HorovodMissing(
            "Horovod is not installed for this Python: run `make setup`, or `gba-hvd doctor` to see what is missing"
        ) from error
    return hvd


def worker_lost(message: str) -> Exception:
    """The error on which Horovod's elastic loop re-forms the world. It does not show the message, so that is logged."""
    logging.getLogger("gba_hvd").warning(message)
    if "horovod.torch" in sys.modules:
        from horovod.common.exceptions import HorovodInternalError

        error: Exception = HorovodInternalError(message)
        return error
    return GbaError(message)


def hosts_updated() -> Exception:
    """The interruption on which Horovod's elastic loop lets workers in or out.

    `skip_sync` is never asked for: survivors that skip the state exchange while late joiners wait in it would hang for
    ever (horovod #3494). Every worker takes part in every exchange.
    """
    from horovod.common.exceptions import HostsUpdatedInterrupt

    interrupt: Exception = HostsUpdatedInterrupt(skip_sync=False)
    return interrupt


def all_or_none(
    world: World, is_restart: bool, name: str, act: Callable[[], T], what: str = "its host's shard memory"
) -> T:
    """Do something that may fail on one rank, and stop on all: no rank is left waiting for a worker that failed.

    name: of what is done, also of the collective. Raises the rank's own error there, elsewhere `WorldLost`, which names
    the rank; of a new job also on ranks with the same error as one before them, so that it is shown once.
    The survivors of a running job do not fail with a late joiner: they form a world without it.
    """
    failure: Exception | None = None
    try:
        result = act()
    except (GbaError, OSError) as error:
        failure = error
    own = -1 if failure is None else zlib.crc32(str(failure).encode())
    errors = world.gather(name, np.array([own], dtype=np.int64))[:, 0]
    failed = np.flatnonzero(errors >= 0)
    is_said_before = own in errors[: world.rank].tolist() and not is_restart
    if failure is not None and not is_said_before:
        raise failure
    if len(failed):
        text = f"the worker of rank {failed[0]} could not {name} {what}; its log says why"
        raise worker_lost(text) if is_restart else WorldLost(text, rank=int(failed[0]))
    return result


def agree_on(
    world: World, name: str, facts: dict[str, int], sources: Callable[[], Sequence[str]] | None = None,
    parts: Mapping[str, Mapping[str, object]] | None = None,
) -> None:  # fmt: skip
    """All workers must be about to do the same thing.

    sources: names the files or shards that the facts are of, where workers disagree: the error has those that not all
    of them have. parts: what some facts are digests of, plain JSON by name: the error has the first one that differs.
    Either all workers give them, or none does.
    """
    everyone = world.gather(name, np.array(list(facts.values()), dtype=np.int64))
    what = next((one for column, one in enumerate(facts) if len(set(everyone[:, column].tolist())) > 1), None)
    if what is None:
        return
    if sources is not None:
        _refuse_other_sources(world, name, sources())
    asked = "they must run the same script on the same data"
    if what == "epoch":
        asked += (
            ", and leave an epoch alike: at its last step some leave the loop by `break`, and on others it ends by "
            "itself, so decide by state.step"
        )
    found: list[Any] = everyone[:, list(facts).index(what)].tolist()
    if parts is not None and what in parts:
        gathered = world.gather_bytes(f"{name}.parts", json.dumps(parts[what]).encode())
        by_rank = [json.loads(one.tobytes()) for one in gathered]
        first = next(key for one in by_rank for key in one if any(other.get(key) != one[key] for other in by_rank))
        what, found = f"{what}, first of {first!r}", [one.get(first) for one in by_rank]
    raise StateMismatch(f"the workers disagree about the {what}: by rank {found}; {asked}")


def _refuse_other_sources(world: World, name: str, sources: Sequence[str]) -> None:
    words = world.gather_bytes(f"{name}.sources", json.dumps(list(sources)).encode())
    if differences := name_lists.differing([json.loads(one.tobytes()) for one in words]):
        raise StateMismatch(name_lists.refusal(differences))
