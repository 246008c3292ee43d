"""A host's shard memory: one memory-mapped file that all workers of the host share.

Who owns what. The file belongs to the job, not to a process. Each shard is written by one worker at a time, the one
that serves it; everybody on the host reads. A worker's death leaves the file as it is.

Order in which things become visible. A shard's `ready` mark is written after its rows are initialised. Around each
step the serving worker writes `begun = k`, changes the rows, writes `finished = k`. A reader of step k waits for
`finished >= k`: the two marks are a seqlock. So a crash leaves one of: begun == finished (complete), begun > finished
(the step is partly in this shard). The marks are aligned 64-bit stores; their order relies on x86-64's total store
order (an assumption stated in DESIGN.md).

One host. `memory.json` names the host that has the memory, see `shm.host_identity`.

Life. Every process that has the memory open holds a shared lock on the file `alive`; the kernel lets go of it when the
process dies, however it dies. The last one out removes the folder; after a crash `shm.reaper` does.

Whose it is. The file `owner` has a fingerprint of the job that opened it, which two jobs of one name do not share. It
is read and written under the lock `door`: a job finds its own, or a memory that no process lives in, or is refused. A
crash leaves the fingerprint of a job that has ended; the next one writes its own over it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import futex, memory_limit, reaper, sweep
from gba_hvd.shm import job_folder as folders
from gba_hvd.shm.file_locks import lock_owners
from gba_hvd.shm.file_space import limit_reached, or_refuse, take
from gba_hvd.shm.host_identity import Host, elsewhere, take_from
from gba_hvd.shm.job_folder import job_folder
from gba_hvd.shm.layout import FINISHED, PAGE_WORDS, Group, Layout, table_seed
from gba_hvd.shm.mapped_file import MappedFile
from gba_hvd.shm.process_state import is_alive, is_stopped
from gba_hvd.shm.vocabulary import Vocabulary
from recovery.storage.rename import replace_file

log = logging.getLogger("gba_hvd")
_OPEN_TRIES = 5
_MACHINES = ("x86_64", "AMD64")
_END_TIMEOUT_S = 10.0
_LOOKS, _LOOK_S = 10, 0.02
_LOOK_AT_WRITER_S = 0.02  # whether it lives, while a step of its shards is waited for
_NO_PROCESS = -1
UNSEEN = 0  # in place of the number of a process that holds a lock in another namespace of processes
_STOPPED_S = 1.0
_BYTES_OF_A_THREAD = 64 << 20  # that it initialises in about a quarter of a second
_SPARE, _SIZE_STEP = 1.25, 64 << 20  # of a size that is suggested: room for messages, and what it is a multiple of
_READY = 0x6762612D72656479  # "gba-redy"


@dataclass(frozen=True)
class Marks:
    """Marks of every shard: is it here, the last steps begun and finished on it, when it was placed here. int64 [S]
    each.
    """

    ready: np.ndarray
    begun: np.ndarray
    finished: np.ndarray
    placed: np.ndarray


class InitialRowSource(Protocol):
    """Where rows start, in tables that do not start as the layout says."""

    @property
    def is_plain(self) -> bool:
        """Filling a shard runs no code and reads no file of the user's."""

    def std(self, table: str) -> float | None:
        """The deviation of normally distributed rows; None: `rows` gives every row."""

    def rows(self, table: str, shard: int, n_shards: int) -> Iterable[tuple[np.ndarray, np.ndarray]]:
        """(ids int64 [k], weights float32 [k, dim]) of a shard's rows, in parts; a row may come again."""


class ShardMemory:
    """Open with `create_or_open`; `close()` may be called twice.

    flat:  float32 [S * region_words]  the complete memory, shard after shard
    words: uint32 [S * region_words]   the same
    initial: first values of rows; None: as the layout says
    """

    def __init__(self, folder: Path, layout: Layout, alive_fd: int | None, mapped: MappedFile, inode: int) -> None:
        self.folder, self.layout, self._inode = folder, layout, inode
        self.initial: InitialRowSource | None = None
        self._alive_fd: int | None = alive_fd
        self._map = mapped
        self._device: Callable[[], None] | None = None
        self._awaiting_device = threading.Lock()
        self._flat: np.ndarray = mapped.bytes.view(np.float32)
        self._words: np.ndarray = mapped.bytes.view(np.uint32)
        self._vocabularies = {g.at: Vocabulary(self.flat, layout, g) for g in layout.groups if g.hashed is not None}
        marks: np.ndarray = mapped.bytes.view(np.int64).reshape(layout.n_shards, layout.region_words // 2)
        self._ready, self._begun, self._finished = marks[:, 0], marks[:, 1], marks[:, FINISHED]
        self._finished_at = int(self._finished.ctypes.data)  # (asking numpy each time takes longer than the wake-up)
        self._writer, self._placed = marks[:, 3], marks[:, 4]

    @classmethod
    def create_or_open(
        cls, base: Path, job_id: str, layout: Layout, grace_s: float, owner: str | None = None
    ) -> ShardMemory:
        """Open the job's memory on this host, or make it (without any shard in it yet).

        owner: the job's fingerprint; "": no process may live in the memory; None: not asked.
        Raises ShardMemoryError when the folder cannot be written, cannot be trusted, or another job lives in it, or
        left it.
        """
        refuse_machine(platform.machine())
        folder = job_folder(base, job_id)
        try:
            for _ in range(_OPEN_TRIES):
                folders.make(folder)
                try:
                    return cls._open(folder, layout, grace_s, owner)
                except FileNotFoundError:
                    continue  # the reaper removed the folder under our hands
        except OSError as error:
            if isinstance(error, ShardMemoryError):
                raise
            raise ShardMemoryError(
                f"shard memory cannot be made in {base}: {error.strerror}; "
                "make the folder writable or name another one with GBA_HVD_SHARD_DIR"
            ) from error
        raise ShardMemoryError(
            f"{folder} disappeared {_OPEN_TRIES} times while it was being opened; is something removing it?"
        )

    @classmethod
    def attach(cls, folder: Path, layout: Layout) -> ShardMemory:
        """Map a memory that workers keep alive. The companion server does: it lives no longer than they want it."""
        folders.check(folder)
        with open(folder / "shards", "r+b") as file:
            return cls(folder, layout, None, _map(file, layout), os.fstat(file.fileno()).st_ino)

    @classmethod
    def _open(cls, folder: Path, layout: Layout, grace_s: float, owner: str | None) -> ShardMemory:
        with _locked(folder):
            alive_fd = os.open(folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(alive_fd, fcntl.LOCK_SH)  # waits while the reaper removes the folder
                if os.fstat(alive_fd).st_nlink == 0:
                    raise FileNotFoundError(folder)
                about, path = folder / "memory.json", folder / "shards"
                mine, host = {"format": format_of(layout), **layout.describe()}, Host.here(folder.parent)
                if about.exists():
                    theirs = _description(about)
                    held_by = theirs.pop("host", None)
                    is_asked = owner is not None and held_by is not None and Host(**held_by) == host
                    if is_asked and (not owner or owner != _owner_of(folder)):
                        _refuse_if_used(folder, alive_fd)
                    if json.dumps(theirs) != json.dumps(mine):  # the order of the tables counts
                        what = f"it holds {difference(theirs, mine)}"
                        _refuse_if_used(folder, alive_fd, f": {what}")
                        raise ShardMemoryError(
                            f"{folder} was left by another job, which has ended: {what}; "
                            f"remove it (rm -r {folder}) or choose another GBA_HVD_JOB_ID or GBA_HVD_SHARD_DIR"
                        )
                    if Host(**held_by) != host:
                        take_from(Host(**held_by), host, folder, alive_fd)
                        replace_file(about, json.dumps({**mine, "host": asdict(host)}))
                else:
                    for line in sweep.in_words(sweep.sweep(folder.parent, grace_s)):
                        log.info("%s", line)
                    _make_file(path, layout)
                    reaper.start(folder, grace_s)
                    replace_file(about, json.dumps({**mine, "host": asdict(host)}))
                if owner is not None:
                    _write_owner(folder, owner)
                with open(path, "r+b") as file:
                    mapped, inode = _map(file, layout), os.fstat(file.fileno()).st_ino
            except BaseException:
                os.close(alive_fd)
                raise
        return cls(folder, layout, alive_fd, mapped, inode)

    def give_to(self, owner: str) -> None:
        """The job that lives here continues under this fingerprint."""
        with _locked(self.folder):
            _write_owner(self.folder, owner)

    @property
    def is_cut_short(self) -> bool:
        """Touching its last rows would kill this process."""
        return self._map.file_size() < self.layout.n_bytes

    def trouble(self) -> str:
        """What others have done to the file behind the mapped pages, in words; empty: nothing.

        A file that this process has closed may be removed.
        """
        path = self.folder / "shards"
        try:
            found = os.stat(path)
        except FileNotFoundError:
            found = None
        if found is None or found.st_ino != self._inode:
            if self.is_closed:
                return ""
            return (
                f"{self.folder} was removed while the job was using it: by hand, by a cleaner of temporary files, or, "
                "in /dev/shm, by systemd-logind when the user's last session ended (RemoveIPC=yes). No worker or "
                "server can open its tables any more. Start the job again: it resumes from its newest checkpoint, if "
                "it saves any. Before that, set RemoveIPC=no in logind.conf (or: loginctl enable-linger USER), or name "
                "a folder that nothing cleans with GBA_HVD_SHARD_DIR"
            )
        if found.st_size < self.layout.n_bytes:
            return (
                f"{path} was cut to {found.st_size:,} of {self.layout.n_bytes:,} bytes while the job was using it: "
                "the rows behind that are gone, and a process that touches them is killed by SIGBUS. Find out what "
                "writes there, and start the job again: it resumes from its newest checkpoint, if it saves any"
            )
        return ""

    # --- a device that writes in the background -----------------------------------------------------------------------

    def written_by_device(self, wait: Callable[[], None]) -> None:
        """A device writes rows of this process's shards, and marks the step finished. wait: returns when it has."""
        with self._awaiting_device:
            self._device = wait

    def await_device(self) -> None:
        """Return when it has. Who reads or writes rows here, reads marks, or begins a step, waits for it.

        Before a shard is placed, filled or dropped the job forms its world, and has waited (`membership.join`).
        """
        if self._device is None:
            return
        with self._awaiting_device:
            if self._device is not None:
                self._device()
            self._device = None

    @property
    def is_written_by_device(self) -> bool:
        """Whether it may still be writing."""
        return self._device is not None

    @property
    def flat(self) -> np.ndarray:
        self.await_device()
        return self._flat

    @property
    def words(self) -> np.ndarray:
        self.await_device()
        return self._words

    # --- rows ------------------------------------------------------------------------------------------------------

    def vocabulary(self, group: Group) -> Vocabulary | None:
        """Which ids have rows, in a hashed table; None in other groups."""
        return self._vocabularies.get(group.at)

    def record_starts(self, keys: np.ndarray, group: Group) -> np.ndarray:
        """uint64 [n]: the word at which each key's record starts, in a shard that is not being written."""
        vocabulary = self.vocabulary(group)
        return self.layout.record_starts(keys if vocabulary is None else vocabulary.rows(keys), group)

    def gather(self, keys: np.ndarray, group: Group, offset: int, out: np.ndarray) -> None:
        """out[i] = the words of the record of keys[i] from `offset` on. out: float32 [n, width]

        A record that another process writes meanwhile may be half old and half new; it is never that of another key.
        """
        vocabulary = self.vocabulary(group)
        if vocabulary is None:
            kernels.gather_rows(self.flat, self.layout.record_starts(keys, group), offset, out)
        else:
            vocabulary.gather(keys, offset, out)

    def count_changed(self, starts: np.ndarray, group: Group) -> None:
        """Records were written that no gradient touched: a checkpoint of what changed takes them."""
        kernels.count_more(self.words, starts, group.record, np.full(len(starts), 2, np.uint32))

    # --- shards ----------------------------------------------------------------------------------------------------

    def marks(self) -> Marks:
        self.await_device()
        ready = (self._ready == _READY).astype(np.int64)
        return Marks(ready, self._begun.copy(), self._finished.copy(), self._placed.copy())

    def ready(self) -> list[int]:
        """The shards that are here."""
        found: list[int] = np.flatnonzero(self._ready == _READY).tolist()
        return found

    def has(self, shard: int) -> bool:
        """Whether the shard is here."""
        return int(self._ready[shard]) == _READY

    def steps_of(self, shard: int) -> tuple[int, int]:
        """(finished, begun), read in this order: a reader of rows in between sees whether a step is in flight."""
        self.await_device()
        finished = int(self._finished[shard])
        return finished, int(self._begun[shard])

    def step_span(self) -> tuple[int, int]:
        """The oldest finished and the newest begun step of the shards that are here: the same between two steps."""
        marks, here = self.marks(), self.ready()
        return int(marks.finished[here].min()), int(marks.begun[here].max())

    def stood_still_since(self, before: Marks) -> bool:
        """Whether rows read since `before` (`marks`) are of one step: none was in flight then, and none has begun."""
        now, here = self.marks(), self.ready()
        moved = (before.begun > before.finished) | (now.begun != before.begun) | (now.finished != before.finished)
        return not moved[here].any()

    def reserve(self, shards: list[int], bytes_per_row: int = 0) -> None:
        """Take the space of these shards from the file system now, so that no later write can fail for lack of it.

        bytes_per_row: of what checkpoints keep of saved rows in this folder; room for it is asked for, and not taken
        """
        beside = bytes_per_row * len(shards) * sum(group.rows_per_shard for group in self.layout.groups)
        need = len(shards) * self.layout.region_bytes + beside
        what = f"{len(shards)} of {self.layout.n_shards} shards need {_size(need)}"
        if beside:
            what += f" ({_size(beside)} of it for what checkpoints keep of saved rows)"
        stat = os.statvfs(self.folder)
        own = 512 * os.stat(self.folder / "shards").st_blocks  # of it, shards that are not ready hold space for nothing
        spare = own - int((self._ready == _READY).sum()) * self.layout.region_bytes
        spare = max(0, spare)
        free = stat.f_bavail * stat.f_frsize + spare
        total = stat.f_blocks * stat.f_frsize
        if need > free:
            raise ShardMemoryError(
                f"{what} in {self.folder.parent}, which has "
                f"{_size(total)}, {_size(free)} of it free: {_room(total - free + need)}{self._what_dead_jobs_hold()}"
            )
        limit = memory_limit.of_folder(self.folder)
        if limit is not None and need - spare > limit.free:
            raise ShardMemoryError(
                f"{what} of memory in {self.folder.parent}, "
                f"and this container's limit is {_size(limit.limit)} ({limit.file}), {_size(limit.used)} of it in use: "
                "the kernel would kill the workers. Raise the limit (docker run --memory="
                f"{_mebibytes(limit.used + need)}m, Kubernetes: resources.limits.memory), or name a folder on a disk "
                f"with GBA_HVD_SHARD_DIR{self._what_dead_jobs_hold()}"
            )
        n_bytes = self.layout.region_bytes
        for first, end in _runs(shards):
            self._map.take_huge(first * n_bytes, end * n_bytes)
        with open(self.folder / "shards", "r+b") as file:
            for shard in shards:
                take(file.fileno(), shard * n_bytes, n_bytes, "rows", self.folder)

    def _what_dead_jobs_hold(self) -> str:
        dead = sweep.orphaned_memory(self.folder.parent)
        if not dead:
            return ""
        return f"; dead jobs hold {_size(sum(left.n_bytes for left in dead))} there: gba-hvd clean --yes removes that"

    def init_shards(self, shards: Sequence[int], step: int, ready: bool = True, n_sharers: int = 1) -> None:
        """`init_shard` for each, in several threads where there is much to write.

        n_sharers: processes of this host that do so now, which share its cores; at least 1
        """
        n_threads = 1
        if shards and (self.initial is None or self.initial.is_plain):  # (one thread calls functions of the user)
            n_cores = len(os.sched_getaffinity(0)) // n_sharers
            n_threads = min(n_cores, len(shards) * self.layout.region_bytes // _BYTES_OF_A_THREAD)
        if n_threads < 2:
            for shard in shards:
                self.init_shard(shard, step, ready)
            return
        with ThreadPoolExecutor(n_threads, "gba-hvd init") as threads:
            begun = [threads.submit(self.init_shard, shard, step, ready) for shard in shards]
            try:
                for one in begun:
                    one.result()
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise

    def init_shard(self, shard: int, step: int, ready: bool = True) -> None:
        """Give every row of a shard its initial value, zero slots and counters, as of `step`.

        ready: False leaves it absent, for a caller that fills it before `set_ready`.
        """
        layout, start, initial = self.layout, shard * self.layout.region_words, self.initial
        self._ready[shard] = 0
        self.flat[start + PAGE_WORDS : start + layout.region_words] = 0.0
        for group in layout.groups:
            if (vocabulary := self.vocabulary(group)) is not None:
                vocabulary.clear(shard)
                for ids, rows in () if initial is None else initial.rows(group.tables[0].name, shard, layout.n_shards):
                    vocabulary.fill(ids, rows, step)
                continue
            for table, first in zip(group.tables, group.first, strict=True):
                seed = np.uint64(table_seed(layout.seed, table.name))
                at = start + group.at + first * group.record
                std = layout.init_std if initial is None else initial.std(table.name)
                if std is not None:
                    kernels.init_rows(
                        self.flat, at, group.record, table.n_rows, shard, layout.n_shards, group.dim, seed,
                        np.float32(std),
                    )  # fmt: skip
                for ids, rows in () if initial is None else initial.rows(table.name, shard, layout.n_shards):
                    places = at + ids // layout.n_shards * group.record
                    self.flat[places[:, None] + np.arange(group.dim)] = rows
        if ready:
            self.set_ready(shard, step)

    def carry_over(self, closed: ShardMemory) -> None:
        """Have the shards, marks included, of a memory that this process has closed and still has mapped.

        Raises ShardMemoryError where there is no room, or where the file has rows of another job. What is mapped stays.
        """
        if self._inode == closed._inode:
            return
        if self.ready():
            raise ShardMemoryError(
                f"{self.folder} has rows of another job of this name, while those of this one are only in this process:"
                f" remove it (rm -r {self.folder}) when that job has ended, and train again"
            )
        shards = closed.ready()
        self.reserve(shards)
        for shard in shards:
            to, words = shard * self.layout.region_words, closed.layout.region_words
            self.words[to + 2 : to + words] = closed.words[to + 2 : to + words]
            self._ready[shard] = _READY  # the first two words, last

    def set_ready(self, shard: int, step: int) -> None:
        self._begun[shard] = self._finished[shard] = step
        self._ready[shard] = _READY  # last: from here on the shard exists

    def place(self, shard: int, number: int) -> None:
        """This host is given a shard, which is filled next. number: larger than that of any other copy."""
        self._ready[shard] = 0  # first: an old copy must not pass for the new one
        self._placed[shard] = number

    def set_absent(self, shard: int) -> None:
        """The shard is not here, or not complete yet."""
        self._ready[shard] = 0

    def drop(self, shard: int) -> None:
        """Give the space of a shard's rows back; it now lives on another host. The page of its marks stays."""
        self._ready[shard] = 0
        start, header = shard * self.layout.region_words, 4 * PAGE_WORDS
        self.words[start : start + PAGE_WORDS] = 0
        with contextlib.suppress(OSError):  # not every file system can; then the space stays taken
            self._map.free(4 * start + header, self.layout.region_bytes - header)

    def region(self, shard: int) -> np.ndarray:
        """float32 [region_words], a view: the complete shard, marks included."""
        return self.flat[shard * self.layout.region_words : (shard + 1) * self.layout.region_words]

    def begin(self, shards: np.ndarray, step: int) -> None:
        self.await_device()
        self._writer[shards] = os.getpid()
        self._begun[shards] = step

    def finish(self, shards: np.ndarray, step: int) -> None:
        self._finished[shards] = step
        for shard in shards.tolist():
            futex.wake(self._mark_address(shard))

    def wait_finished(self, shards: np.ndarray, step: int, timeout_s: float) -> None:
        """Wait until `step` is finished on all these shards; TimeoutError names the shard and its writer."""
        self.await_device()
        deadline = None
        while True:
            behind = shards[self._finished[shards] < step]
            if len(behind) == 0:
                return
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            shard, writer, found = int(behind[0]), int(self._writer[behind[0]]), int(self._finished[behind[0]])
            if found >= step:
                continue
            if now > deadline or (writer and not is_alive(writer)):
                why = "did not finish" if now > deadline else "left, or died, before it finished"
                raise TimeoutError(
                    f"shard {shard}: process {writer} {why} step {step} (last finished {self._finished[shard]})"
                )
            futex.wait(self._mark_address(shard), found, min(_LOOK_AT_WRITER_S, deadline - now))

    def _mark_address(self, shard: int) -> int:
        """Of the low half of the newest step that is finished on the shard: the first, as x86 is little-endian."""
        return self._finished_at + shard * self._finished.strides[0]

    def claim(self, shards: np.ndarray) -> None:
        """This process serves these shards from now on."""
        self._writer[shards] = os.getpid()

    def release(self, shards: np.ndarray) -> None:
        """This process leaves these shards as they are for now; who waits for a step on them need not wait longer.

        Those that another process has claimed meanwhile stay its own.
        """
        self._writer[shards[self._writer[shards] == os.getpid()]] = _NO_PROCESS

    def end_old_writers(self, members: set[int]) -> None:
        """End processes of this host that served shards, have not released them, and are no members of the new world.

        Such a worker is dead or stopped. Stopped, it would continue writing an old step when it is continued, under the
        feet of its successor. Such a server may still be in its mode; one that has left it has released its shards.
        """
        for pid in set(self._writer[self._ready == _READY].tolist()) - members - {0}:
            if not is_alive(pid) or not self._maps_us(pid):
                continue
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + _END_TIMEOUT_S
            while is_alive(pid):
                if time.monotonic() > deadline:
                    raise ShardMemoryError(
                        f"process {pid} served shards, is no longer in the job and cannot be killed; end it by hand"
                    )
                time.sleep(0.01)

    def end_stopped(self, pids: Iterable[int]) -> None:
        """End those of these workers of this host that are stopped: the launcher forms no world before they have ended.

        One that is only looked at (a stack that is printed) continues within a second.
        """
        if not (stopped := [pid for pid in pids if is_stopped(pid)]):
            return
        time.sleep(_STOPPED_S)
        for pid in stopped:
            if is_stopped(pid) and self._maps_us(pid):
                log.warning(
                    "process %d of this host is stopped, and the job cannot continue with it: it is killed", pid
                )
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _maps_us(self, pid: int) -> bool:
        """Whether the process with this number still is one of ours."""
        try:
            return str(self.folder).encode() in Path(f"/proc/{pid}/maps").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return False

    @property
    def is_closed(self) -> bool:
        return self._alive_fd is None

    def close(self, remove: bool = True) -> None:
        """Release the memory; the last process out removes the folder, unless a restart may want the rows."""
        if self._alive_fd is None:
            return
        self.await_device()
        fd, self._alive_fd = self._alive_fd, None
        try:
            with _locked(self.folder):
                if remove:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    reaper.remove(self.folder)
        except (BlockingIOError, FileNotFoundError):
            pass  # another process still uses it, or has removed it
        finally:
            os.close(fd)


def refuse_machine(machine: str) -> None:
    """Raises ShardMemoryError on a machine that may show others the stores of a process in another order."""
    if machine not in _MACHINES:
        raise ShardMemoryError(
            f"this machine is {machine}; shard memory needs x86-64: its marks rely on the order in which such a "
            "machine shows the stores of one process to another. Run the workers on x86-64 hosts"
        )


def _make_file(path: Path, layout: Layout) -> None:
    """The file of a memory without shards. The pages of all marks are taken now: to look at one that the file system
    has no room for would kill the process. Raises ShardMemoryError when there is no room."""
    with open(path, "wb") as file:
        try:
            file.truncate(layout.n_bytes)
            for shard in range(layout.n_shards):
                os.posix_fallocate(file.fileno(), shard * layout.region_bytes, 4 * PAGE_WORDS)
        except OSError as error:
            path.unlink()
            if limit := limit_reached(error, layout.n_bytes):
                raise ShardMemoryError(f"the tables have no room in {path.parent.parent}: {limit}") from error
            stat = os.statvfs(path.parent)
            used = (stat.f_blocks - stat.f_bavail) * stat.f_frsize
            raise ShardMemoryError(
                f"the marks of {layout.n_shards} shards need {4 * layout.n_shards} KiB in {path.parent.parent}, "
                f"{error.strerror}: {_room(used + layout.n_bytes)}"
            ) from error


def format_of(layout: Layout) -> int:
    """Version of the memory's format: in 2 the filter of a hashed table had another size than in 3."""
    return 3 if any(table.hashed is not None and table.hashed.has_filter for table in layout.tables) else 2


def is_of(folder: Path, layout: Layout) -> bool:
    """Whether the folder has a memory of this layout that this host may take over. Raises FileNotFoundError."""
    theirs = json.loads((folder / "memory.json").read_text())
    host = theirs.pop("host", None)
    same = json.dumps(theirs) == json.dumps({"format": format_of(layout), **layout.describe()})
    return same and Host(**host).boot == Host.here(folder.parent).boot


def _map(file: BinaryIO, layout: Layout) -> MappedFile:
    size = os.fstat(file.fileno()).st_size
    if size < layout.n_bytes:
        raise ShardMemoryError(
            f"{file.name} has {size:,} bytes, expected {layout.n_bytes:,}: something has cut it short, and its rows "
            "are lost; end the job, remove its folder, and start it again"
        )
    n_bytes = layout.n_bytes
    return or_refuse(lambda: MappedFile(file.fileno(), n_bytes), n_bytes, "the tables", Path(file.name).parent)


def _owner_of(folder: Path) -> str:
    try:
        return (folder / "owner").read_text()
    except FileNotFoundError:
        return ""


def _write_owner(folder: Path, owner: str) -> None:
    if _owner_of(folder) != owner:
        replace_file(folder / "owner", owner)


def _description(about: Path) -> dict[str, Any]:
    """What the memory beside this file holds. Raises ShardMemoryError where the file is damaged."""
    try:
        found: dict[str, Any] = json.loads(about.read_text())
    except ValueError as error:
        raise ShardMemoryError(
            f"{about} was cut off or changed by another program ({error}): what the memory beside it holds is not "
            "known, so no worker can open it. Its job trains on until its world changes, and resumes from its newest "
            f"checkpoint once the folder is removed (rm -r {about.parent})"
        ) from error
    return found


def _refuse_if_used(folder: Path, alive_fd: int, what: str = "") -> None:
    """Raises ShardMemoryError when another process lives in this memory. `door` is held, and `alive` shared."""
    for attempt in range(_LOOKS):  # keepers and servers try the lock for a moment, now and then
        try:
            fcntl.flock(alive_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if attempt < _LOOKS - 1:
                time.sleep(_LOOK_S)
        finally:
            fcntl.flock(alive_fd, fcntl.LOCK_SH)  # a change of the lock that is refused has lost it
    else:
        others = lock_owners(folder / "alive") - {os.getpid()}
        raise ShardMemoryError(in_use(folder, others or {UNSEEN}, what))
    if os.fstat(alive_fd).st_nlink == 0:
        raise FileNotFoundError(folder)


def in_use(folder: Path, pids: Iterable[int], what: str = "") -> str:
    """Why a job cannot have the memory that these processes live in. what: it holds, if that matters"""
    found = sorted(set(pids) - {UNSEEN})
    if found:
        who = f" (process{'es' if len(found) > 1 else ''} {', '.join(map(str, found))})"
    else:
        where = elsewhere(folder)
        who = f" in {where}, which shares {folder.parent} with this one," if where else ""
    return (
        f"a running job{who} uses {folder}{what}: a job that is to run beside it needs a name of its own, by "
        "GBA_HVD_JOB_ID, or another GBA_HVD_SHARD_DIR; if it is the old one of this job, end it first. Do not "
        "remove the folder: it is the other job's model"
    )


def users_of(folder: Path, owner: str) -> set[int]:
    """Processes of this machine that live in this memory, where it is another job's than `owner`'s.

    `UNSEEN` stands for those that the kernel does not name here. Raises FileNotFoundError when there is no memory,
    ShardMemoryError when the folder cannot be trusted.
    """
    if no_process_lives(folder) or (owner and owner == _owner_of(folder)):
        return set()
    return lock_owners(folder / "alive") or {UNSEEN}


def no_process_lives(folder: Path) -> bool:
    """Whether no worker holds the memory of this folder.

    Raises FileNotFoundError when it is gone, ShardMemoryError when it cannot be trusted.
    """
    folders.check(folder)
    with open(folder / "alive", "r+") as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def remove_orphaned_memory(base: Path, job_id: str) -> None:
    """Remove the memory of a job of this name that no process lives in any more, before its reaper would.

    Its companion server ends when the folder is gone. A memory that a process lives in is left alone. Raises
    ShardMemoryError when it cannot be trusted, or is of another machine.
    """
    folder = job_folder(base, job_id)
    with contextlib.suppress(FileNotFoundError, BlockingIOError), _locked(folder), open(folder / "alive") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / "memory.json").exists():
            theirs = json.loads((folder / "memory.json").read_text()).get("host")
            if theirs is not None and Host(**theirs).is_another_machine(Host.here(base)):
                return  # opening it raises the reason
        reaper.remove(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Opening and closing are serialised on a host; `alive` itself only says who lives."""
    folders.check(folder)
    folders.refuse_foreign(folder)
    with open(folder / "door", "a") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
        if os.fstat(door.fileno()).st_nlink == 0:  # the folder was removed; there may be another one of this name
            raise FileNotFoundError(folder)
        yield


def difference(theirs: dict[str, Any], mine: dict[str, Any]) -> str:
    """What two descriptions disagree in, in words: `tables['user'] [100, 8], here [200, 8]`."""
    found = []
    for name in sorted({*theirs, *mine}):
        a, b = theirs.get(name), mine.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            found += [f"{name}[{k!r}] {a.get(k)}, here {b.get(k)}" for k in {**a, **b} if a.get(k) != b.get(k)]
            if not found and list(a) != list(b):
                found.append(f"{name} in the order {list(a)}, here {list(b)}")
        elif (isinstance(a, dict) and b is None) or (a is None and isinstance(b, dict)):
            found.append(f"{name}, here none" if b is None else f"no {name}, here one")
        elif a != b:
            found.append(f"{name} {a}, here {b}")
    return "; ".join(found[:5])


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """(first, one behind the last) of each run of numbers that follow each other."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found


def _room(n_bytes: int) -> str:
    """What to do where a folder has no room. n_bytes: to be held there, in all"""
    mebibytes = _mebibytes(n_bytes)
    return (
        f"name a larger folder with GBA_HVD_SHARD_DIR (a disk will do), or enlarge /dev/shm (docker run "
        f"--shm-size={mebibytes}m; elsewhere mount -o remount,size={mebibytes}m /dev/shm)"
    )


def _mebibytes(n_bytes: int) -> int:
    return math.ceil(_SPARE * n_bytes / _SIZE_STEP) * (_SIZE_STEP >> 20)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
