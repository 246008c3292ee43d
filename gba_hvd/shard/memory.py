"""A host's shard memory: one memory-mapped file that all workers of the host share.

Who owns what. The file belongs to the job, not to a process. Each shard is written by one worker at a time, the one
that serves it; everybody on the host reads. A worker's death leaves the file as it is.

Order in which things become visible. A shard's `ready` mark is written after its rows are initialised. Around each
step the serving worker writes `begun = k`, changes the rows, writes `finished = k`. A reader of step k waits for
`finished >= k`. So a crash leaves one of: begun == finished (whole), begun > finished (the step is partly in this
shard). The marks are aligned 64-bit stores; their order relies on x86-64's total store order (an assumption stated in
DESIGN.md).

Life. Every process that has the memory open holds a shared lock on the file `alive`; the kernel lets go of it when the
process dies, however it dies. The last one out removes the folder; after a crash `shard.keeper` does.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd import kernels
from gba_hvd.errors import ShardMemoryError
from gba_hvd.shard import keeper
from gba_hvd.shard.layout import PAGE_WORDS, Layout, table_seed

FORMAT = 1
_OPEN_TRIES = 5
_END_TIMEOUT_S = 10.0
_NOBODY = -1
_READY = 0x6762612D72656479  # "gba-redy"


@dataclass(frozen=True)
class Marks:
    """Of every shard: is it here, the last steps begun and finished on it, when it was placed here. int64 [S] each."""

    ready: np.ndarray
    begun: np.ndarray
    finished: np.ndarray
    placed: np.ndarray


def job_folder(base: Path, job_id: str) -> Path:
    return base / f"gba-hvd-{job_id}"


class ShardMemory:
    """Open with `create_or_open`; `close()` may be called twice.

    flat:  float32 [S * region_words]  the whole memory, shard after shard
    """

    def __init__(self, folder: Path, layout: Layout, alive_fd: int | None, mapped: mmap.mmap) -> None:
        self.folder, self.layout = folder, layout
        self._alive_fd: int | None = alive_fd
        self._map = mapped
        self.flat = np.frombuffer(mapped, dtype=np.float32)
        self.words = np.frombuffer(mapped, dtype=np.uint32)
        marks = np.frombuffer(mapped, dtype=np.int64).reshape(layout.n_shards, layout.region_words // 2)
        self._ready, self._begun, self._finished = marks[:, 0], marks[:, 1], marks[:, 2]
        self._writer, self._placed = marks[:, 3], marks[:, 4]

    @classmethod
    def create_or_open(cls, base: Path, job_id: str, layout: Layout, grace_s: float) -> ShardMemory:
        """Open the job's memory on this host, or make it (without any shard in it yet).

        Raises ShardMemoryError when the folder cannot be written or belongs to something else.
        """
        folder = job_folder(base, job_id)
        try:
            for _ in range(_OPEN_TRIES):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                try:
                    return cls._open(folder, layout, grace_s)
                except FileNotFoundError:
                    continue  # the keeper removed the folder under our hands
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
        with open(folder / "shards", "r+b") as file:
            return cls(folder, layout, None, mmap.mmap(file.fileno(), layout.n_bytes))

    @classmethod
    def _open(cls, folder: Path, layout: Layout, grace_s: float) -> ShardMemory:
        with _locked(folder):
            alive_fd = os.open(folder / "alive", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(alive_fd, fcntl.LOCK_SH)  # waits while the keeper removes the folder
                if os.fstat(alive_fd).st_nlink == 0:
                    raise FileNotFoundError(folder)
                about, path = folder / "memory.json", folder / "shards"
                mine = {"format": FORMAT, **layout.describe()}
                created = not about.exists()
                if created:
                    with open(path, "wb") as file:
                        file.truncate(layout.n_bytes)
                    keeper.start(folder, grace_s)
                    about.with_suffix(".new").write_text(json.dumps(mine))
                    about.with_suffix(".new").rename(about)
                elif about.read_text() != json.dumps(mine):  # the order of the tables counts
                    theirs = json.loads(about.read_text())
                    raise ShardMemoryError(
                        f"{folder} was left by another job: it holds {difference(theirs, mine)}; "
                        f"remove it (rm -r {folder}) or choose another GBA_HVD_JOB_ID or GBA_HVD_SHARD_DIR"
                    )
                with open(path, "r+b") as file:
                    mapped = mmap.mmap(file.fileno(), layout.n_bytes)
            except BaseException:
                os.close(alive_fd)
                raise
        return cls(folder, layout, alive_fd, mapped)

    # --- shards ----------------------------------------------------------------------------------------------------

    def marks(self) -> Marks:
        ready = (self._ready == _READY).astype(np.int64)
        return Marks(ready, self._begun.copy(), self._finished.copy(), self._placed.copy())

    def ready(self) -> list[int]:
        """The shards that are here."""
        return [int(shard) for shard in np.flatnonzero(self._ready == _READY)]

    def steps_of(self, shard: int) -> tuple[int, int]:
        """(finished, begun), read in this order: a reader of rows in between sees whether a step is under way."""
        finished = int(self._finished[shard])
        return finished, int(self._begun[shard])

    def reserve(self, shards: list[int]) -> None:
        """Take the space of these shards from the file system now, so that no later write can fail for lack of it."""
        need = len(shards) * self.layout.region_bytes
        stat = os.statvfs(self.folder)
        own = 512 * os.stat(self.folder / "shards").st_blocks  # of it, shards that are not ready hold space for nothing
        spare = own - int((self._ready == _READY).sum()) * self.layout.region_bytes
        free = stat.f_bavail * stat.f_frsize + max(0, spare)
        if need > free:
            raise ShardMemoryError(
                f"{len(shards)} of {self.layout.n_shards} shards need {_gib(need)} in {self.folder.parent}, "
                f"{_gib(free)} are free: name a larger folder with GBA_HVD_SHARD_DIR (a disk will do), "
                f"or enlarge /dev/shm (mount -o remount,size=..., docker run --shm-size=...)"
            )
        with open(self.folder / "shards", "r+b") as file:
            for shard in shards:
                os.posix_fallocate(file.fileno(), shard * self.layout.region_bytes, self.layout.region_bytes)

    def init_shard(self, shard: int, step: int, ready: bool = True) -> None:
        """Give every row of a shard its initial value, zero slots and counters, as of `step`.

        ready: False leaves it absent, for somebody who fills it before `set_ready`.
        """
        layout, start = self.layout, shard * self.layout.region_words
        self._ready[shard] = 0
        self.flat[start + PAGE_WORDS : start + layout.region_words] = 0.0
        for group in layout.groups:
            for table, first in zip(group.tables, group.first, strict=True):
                seed = np.uint64(table_seed(layout.seed, table.name))
                at = start + group.at + first * group.record
                std = np.float32(layout.init_std)
                kernels.init_rows(
                    self.flat, at, group.record, table.n_rows, shard, layout.n_shards, group.dim, seed, std
                )
        if ready:
            self.set_ready(shard, step)

    def set_ready(self, shard: int, step: int) -> None:
        self._begun[shard] = self._finished[shard] = step
        self._ready[shard] = _READY  # last: from here on the shard exists

    def place(self, shard: int, number: int) -> None:
        """This host is given a shard, which somebody fills next. number: larger than that of any other copy."""
        self._ready[shard] = 0  # first: an old copy must not pass for the new one
        self._placed[shard] = number

    def set_absent(self, shard: int) -> None:
        """The shard is not here, or not whole yet."""
        self._ready[shard] = 0

    def drop(self, shard: int) -> None:
        """Give the space of a shard back; it now lives on another host."""
        self._ready[shard] = 0
        with contextlib.suppress(OSError, AttributeError):  # not every file system can; then the space stays taken
            self._map.madvise(mmap.MADV_REMOVE, shard * self.layout.region_bytes, self.layout.region_bytes)

    def region(self, shard: int) -> np.ndarray:
        """float32 [region_words], a view: the whole shard, marks included."""
        return self.flat[shard * self.layout.region_words : (shard + 1) * self.layout.region_words]

    def begin(self, shards: np.ndarray, step: int) -> None:
        self._writer[shards] = os.getpid()
        self._begun[shards] = step

    def finish(self, shards: np.ndarray, step: int) -> None:
        self._finished[shards] = step

    def wait_finished(self, shards: np.ndarray, step: int, timeout_s: float) -> None:
        """Wait until `step` is finished on all these shards; TimeoutError names the shard and its writer."""
        deadline = None
        while True:
            behind = shards[self._finished[shards] < step]
            if len(behind) == 0:
                return
            now = time.monotonic()
            deadline = deadline or now + timeout_s
            shard, writer = int(behind[0]), int(self._writer[behind[0]])
            if now > deadline or (writer and not is_alive(writer)):
                why = "did not finish" if now > deadline else "left, or died, before it finished"
                raise TimeoutError(
                    f"shard {shard}: process {writer} {why} step {step} (last finished {self._finished[shard]})"
                )
            time.sleep(20e-6)

    def claim(self, shards: np.ndarray) -> None:
        """This process serves these shards from now on."""
        self._writer[shards] = os.getpid()

    def release(self, shards: np.ndarray) -> None:
        """This process leaves these shards as they are for now; who waits for a step on them need not wait longer."""
        self._writer[shards] = _NOBODY

    def end_old_writers(self, members: set[int]) -> None:
        """End workers of this host that served shards and that the world has moved on without.

        Such a worker is dead or stopped. Stopped, it would go on writing an old step when it is continued, under the
        feet of its successor.
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
        """Let go; the last process out removes the folder, unless told not to (a restart may want the rows)."""
        if self._alive_fd is None:
            return
        fd, self._alive_fd = self._alive_fd, None
        try:
            with _locked(self.folder):
                if remove:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    keeper.remove(self.folder)
        except (BlockingIOError, FileNotFoundError):
            pass  # somebody else still uses it, or has removed it
        finally:
            os.close(fd)


def nobody_lives(folder: Path) -> bool:
    """Whether no worker holds the memory of this folder. Raises FileNotFoundError when it is gone."""
    with open(folder / "alive", "r+") as alive:
        try:
            fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def clear_leftover(base: Path, job_id: str) -> None:
    """Remove the memory of a job of this name that nobody lives in any more, before its keeper would.

    Its companion server ends when the folder is gone. A memory that somebody lives in is left alone.
    """
    folder = job_folder(base, job_id)
    with contextlib.suppress(FileNotFoundError, BlockingIOError), _locked(folder), open(folder / "alive") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)
        keeper.remove(folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Opening and closing are serialised on a host; `alive` itself only says who lives."""
    with open(folder / "door", "a") as door:
        fcntl.flock(door, fcntl.LOCK_EX)
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
        elif a != b:
            found.append(f"{name} {a}, here {b}")
    return "; ".join(found[:5])


def is_alive(pid: int) -> bool:
    """Running or stopped; a zombie that nobody has waited for is dead."""
    try:
        state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in (b"Z", b"X")


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.2f} GiB"
