"""Shard memory: one for all processes of a host, refused clearly, and gone when nobody needs it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import file_space, futex, memory_limit, reaper, shard_memory
from gba_hvd.shm.file_locks import lock_owners, owners_in
from gba_hvd.shm.job_folder import job_folder
from gba_hvd.shm.layout import PAGE_WORDS, Layout, SlotSpec
from gba_hvd.shm.memory_limit import MemoryLimit
from gba_hvd.shm.shard_memory import ShardMemory, difference, remove_orphaned_memory

SIZES = {"user": (40, 8), "item": (9, 3)}
Open = Callable[..., ShardMemory]


def a_layout(tables: dict[str, tuple[int, int]] = SIZES, n_shards: int = 4, seed: int = 0) -> Layout:
    return Layout.of(tables, (SlotSpec("sum", per_row=True),), n_shards, seed, init_std=0.01)


@pytest.fixture
def open_memory(tmp_path: Path) -> Iterator[Open]:
    made: list[ShardMemory] = []

    def make(layout: Layout | None = None, base: Path = tmp_path, grace_s: float = 0.0) -> ShardMemory:
        made.append(ShardMemory.create_or_open(base, "job", layout or a_layout(), grace_s))
        return made[-1]

    yield make
    for memory in made:
        memory.close()


def test_a_second_opener_sees_the_same_pages(open_memory: Open) -> None:
    first, second = open_memory(), open_memory()
    first.init_shard(1, step=0)
    second.flat[5000] = 3.0
    assert first.flat[5000] == 3.0
    assert np.array_equal(first.flat, second.flat)
    assert second.marks().ready.tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize(
    "use",
    [
        lambda memory: memory.flat,
        lambda memory: memory.words,
        lambda memory: memory.marks(),
        lambda memory: memory.steps_of(1),
        lambda memory: memory.region(1),
        lambda memory: memory.begin(np.array([1]), 9),
        lambda memory: memory.wait_finished(np.array([1]), 0, 1.0),
        lambda memory: memory.gather(np.array([1]), memory.layout.groups[0], 0, np.empty((1, 8), np.float32)),
        lambda memory: memory.close(),
    ],
    ids=["flat", "words", "marks", "steps_of", "region", "begin", "wait_finished", "gather", "close"],
)
def test_who_uses_the_memory_waits_for_a_device_that_writes_it(
    open_memory: Open, use: Callable[[ShardMemory], Any]
) -> None:
    memory, waits = open_memory(), list[int]()
    memory.init_shard(1, step=0)
    memory.written_by_device(lambda: waits.append(1))
    for _ in range(2):
        use(memory)
    assert waits == [1], "once for each step"


def test_two_threads_wait_for_the_device(open_memory: Open) -> None:
    memory, is_written, found = open_memory(), threading.Event(), list[bool]()

    def wait() -> None:
        assert is_written.wait(30)

    memory.written_by_device(wait)
    threads = [threading.Thread(target=lambda: found.append(memory.flat is not None)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not found
    is_written.set()
    for thread in threads:
        thread.join(30)
    assert found == [True, True]


def test_marks_report_what_is_there_and_how_far_it_is(open_memory: Open) -> None:
    memory = open_memory()
    for shard in range(4):
        memory.init_shard(shard, step=7)
    memory.begin(np.array([1, 3]), 8)
    memory.finish(np.array([3]), 8)
    marks = memory.marks()
    assert marks.ready.tolist() == [1, 1, 1, 1]
    assert marks.begun.tolist() == [7, 8, 7, 8]
    assert marks.finished.tolist() == [7, 7, 7, 8]


def test_a_shard_that_is_placed_again_is_not_there_until_it_is_filled(open_memory: Open) -> None:
    memory = open_memory()
    memory.init_shard(1, step=7)
    memory.place(1, 3)
    assert memory.marks().ready.tolist() == [0, 0, 0, 0]
    memory.init_shard(1, step=8)
    assert memory.marks().placed.tolist() == [0, 3, 0, 0]


def test_a_shard_starts_over_without_traces_of_before(open_memory: Open) -> None:
    memory = open_memory()
    memory.init_shard(2, step=0)
    fresh = memory.region(2)[1024:].copy()
    memory.region(2)[1024:] = 5.0
    memory.init_shard(2, step=4)
    assert np.array_equal(memory.region(2)[1024:], fresh)
    assert memory.marks().finished[2] == 4


@pytest.mark.parametrize("n_cores", [1, 3])
def test_several_threads_initialise_what_one_does(
    open_memory: Open, monkeypatch: pytest.MonkeyPatch, n_cores: int
) -> None:
    memory = open_memory()
    for shard in range(3):
        memory.init_shard(shard, step=7)
    one_by_one = memory.flat.copy()
    memory.flat[:] = 5.0
    memory.set_absent(3)
    monkeypatch.setattr(shard_memory, "_BYTES_OF_A_THREAD", 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2 * n_cores)))
    names: set[str] = set()
    monkeypatch.setattr(memory, "init_shard", noting_threads(memory.init_shard, names))
    memory.init_shards([0, 1, 2], 7, n_sharers=2)
    assert all(name.startswith("gba-hvd init") for name in names) == (n_cores > 1)
    words = memory.layout.region_words
    for shard in range(3):  # (the page of marks has those of other times)
        rows = slice(shard * words + PAGE_WORDS, (shard + 1) * words)
        assert np.array_equal(memory.flat[rows], one_by_one[rows])
    assert memory.marks().ready.tolist() == [1, 1, 1, 0]
    assert memory.marks().finished.tolist()[:3] == [7, 7, 7]


def noting_threads(act: Callable[..., None], names: set[str]) -> Callable[..., None]:
    def noted(*arguments: object) -> None:
        names.add(threading.current_thread().name)
        act(*arguments)

    return noted


def test_a_dropped_shard_gives_its_space_back(open_memory: Open) -> None:
    memory = open_memory()
    memory.reserve([0, 1, 2, 3])
    for shard in range(4):
        memory.init_shard(shard, step=1)
    before = os.stat(memory.folder / "shards").st_blocks
    memory.drop(2)
    assert memory.marks().ready.tolist() == [1, 1, 0, 1]
    assert os.stat(memory.folder / "shards").st_blocks < before
    assert not memory.region(2).any()
    assert memory.region(3).any()


def test_absent_shards_take_no_space(open_memory: Open) -> None:
    memory = open_memory(a_layout({"user": (200_000, 8)}))
    memory.reserve([0])
    taken = os.stat(memory.folder / "shards").st_blocks * 512
    assert memory.layout.region_bytes <= taken < 2 * memory.layout.region_bytes


# --- what is refused -------------------------------------------------------------------------------------------------


def test_too_little_space_is_seen_before_anything_is_written(
    open_memory: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory(a_layout({"user": (10_000_000, 64)}))
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=3 << 20, f_bavail=2**20, f_frsize=1024))
    words = r"2 of 4 shards need 1\.\d\d GiB in .*, which has 3\.00 GiB, 1\.00 GiB of it free: name a larger folder"
    with pytest.raises(ShardMemoryError, match=words) as refused:
        memory.reserve([0, 1])
    (mebibytes,) = {int(size) for size in re.findall(r"(?:--shm-size|remount,size)=(\d+)m", str(refused.value))}
    needed = 2 * 2**30 + 2 * memory.layout.region_bytes  # beside what others hold there
    assert needed < mebibytes * 2**20 < 1.3 * needed
    assert os.stat(memory.folder / "shards").st_blocks * 512 == 4 * 4096  # the marks


def test_room_for_what_checkpoints_keep_of_rows_is_asked_for_with_that_of_the_rows(
    open_memory: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory(a_layout({"user": (400_000, 8)}))
    blocks = 2 * memory.layout.region_bytes // 4096 + 1
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=blocks, f_bavail=blocks, f_frsize=4096))
    with pytest.raises(ShardMemoryError, match=r"2 of 4 shards need .* MiB \(1 MiB of it for what checkpoints keep"):
        memory.reserve([0, 1], bytes_per_row=4)
    memory.reserve([0, 1])


@pytest.mark.parametrize(
    ("limit", "size", "words"),
    [
        ("RLIMIT_FSIZE", 1 << 20, r"the limit of the size of a file, 1,048,576 bytes.*ulimit -f unlimited.*LimitFSIZE"),
        ("RLIMIT_AS", 1 << 44, r"the limit of the address space of a process, .*ulimit -v unlimited.*LimitAS="),
    ],
)
def test_a_limit_of_the_process_is_named_with_where_to_raise_it(
    tmp_path: Path, limit: str, size: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: object) -> None:
        number = errno.EFBIG if limit == "RLIMIT_FSIZE" else errno.ENOMEM
        raise OSError(number, os.strerror(number))

    kind = getattr(resource, limit)
    monkeypatch.setattr(os, "posix_fallocate", reached)
    monkeypatch.setattr(mmap, "mmap", reached)
    monkeypatch.setattr(resource, "getrlimit", lambda of: (size, -1) if of == kind else (-1, -1))
    ask = partial(file_space.take, 0, 0) if limit == "RLIMIT_FSIZE" else partial(file_space.map_file, 0)
    with pytest.raises(ShardMemoryError, match=words):
        ask(9, "rows", tmp_path)


def test_what_exceeds_the_memory_limit_of_the_container_is_refused(
    open_memory: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = open_memory()
    size = memory.layout.region_bytes
    file = Path("/sys/fs/cgroup/memory.max")
    monkeypatch.setattr(memory_limit, "of_folder", lambda _: MemoryLimit(2**30 + 2 * size, 2**30, file))
    memory.reserve([0, 1])
    words = r"2 of 4 shards need .* MiB of memory in .*limit is 1\.\d\d GiB \(/sys/fs/.*max\), 1\.00 GiB of it in use.*"
    monkeypatch.setattr(memory_limit, "of_folder", lambda _: MemoryLimit(2**30, 2**30, file))
    memory.reserve([0, 1])  # these are in use
    for shard in (0, 1):
        memory.init_shard(shard, step=1)
    with pytest.raises(ShardMemoryError, match=words + r"--memory=\d+m.*GBA_HVD_SHARD_DIR"):
        memory.reserve([2, 3])


def test_a_folder_under_a_file_is_refused(open_memory: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ShardMemoryError, match=r"cannot be made in .*file: Not a directory; .*GBA_HVD_SHARD_DIR"):
        open_memory(base=tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_refused(open_memory: Open) -> None:
    with pytest.raises(ShardMemoryError, match=r"cannot be made in /proc/gba: .*make the folder writable"):
        open_memory(base=Path("/proc/gba"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (a_layout({"user": (41, 8), "item": (9, 3)}), r"tables\['user'\] \[41, 8\], here \[40, 8\]"),
        (a_layout(n_shards=5), "n_shards 5, here 4"),
        (a_layout(seed=3), "seed 3, here 0"),
        (
            a_layout({"item": (9, 3), "user": (40, 8)}),
            r"tables in the order \['item', 'user'\], here \['user', 'item'\]",
        ),
    ],
    ids=["size", "shards", "seed", "order"],
)
def test_memory_of_another_model_is_refused(open_memory: Open, other: Layout, message: str) -> None:
    theirs = open_memory(other, grace_s=30)
    with pytest.raises(
        ShardMemoryError, match=rf"a running job uses .*: it holds {message}: .* Do not remove the fold"
    ):
        open_memory()
    theirs.close(remove=False)
    left = rf"was left by another job, which has ended: it holds {message}; remove it \(rm -r"
    with pytest.raises(ShardMemoryError, match=left):
        open_memory()
    reaper.remove(theirs.folder)


LIVES = """
import fcntl, sys
with open(sys.argv[1], "r+") as alive:
    fcntl.flock(alive, fcntl.LOCK_SH)
    print("holds it", flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_second_job_of_one_name_is_refused_while_somebody_lives_in_the_memory(tmp_path: Path) -> None:
    """The error names the first job, and advises not to remove its memory; once it has ended the second takes over."""
    mine = ShardMemory.create_or_open(tmp_path, "job", a_layout(), 30.0, "first")
    ShardMemory.create_or_open(tmp_path, "job", a_layout(), 30.0, "first").close()  # another worker of the same job
    command = [sys.executable, "-I", "-S", "-c", LIVES, str(mine.folder / "alive")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as worker:
        assert worker.stdout is not None and worker.stdout.readline()
        mine.close(remove=False)
        words = rf"a running job \(process {worker.pid}\) uses .*gba-hvd-job: .* GBA_HVD_JOB_ID.* Do not remove"
        for owner in ("second", ""):
            with pytest.raises(ShardMemoryError, match=words):
                ShardMemory.create_or_open(tmp_path, "job", a_layout(), 30.0, owner)
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait(60)
    second = ShardMemory.create_or_open(tmp_path, "job", a_layout(), 30.0, "second")
    with pytest.raises(ShardMemoryError, match="a running job uses"):
        ShardMemory.create_or_open(tmp_path, "job", a_layout(), 30.0, "third")
    second.give_to("third")
    ShardMemory.create_or_open(tmp_path, "job", a_layout(), 30.0, "third").close()
    second.close()
    assert not second.folder.exists()


def test_a_damaged_description_is_refused_with_what_to_do(open_memory: Open) -> None:
    about = open_memory().folder / "memory.json"
    os.truncate(about, 100)
    with pytest.raises(ShardMemoryError, match=r"memory.json was cut off or changed .*rm -r"):
        open_memory()


def test_what_becomes_of_the_file_behind_the_pages_is_seen(open_memory: Open, tmp_path: Path) -> None:
    memory = open_memory()
    assert memory.trouble() == "" and not memory.is_cut_short
    os.truncate(memory.folder / "shards", 4096)
    assert memory.is_cut_short
    assert f"shards was cut to 4,096 of {memory.layout.n_bytes:,} bytes" in memory.trouble()
    with pytest.raises(ShardMemoryError, match=r"shards has 4,096 bytes, expected .* cut it short"):
        open_memory()
    reaper.remove(memory.folder)
    assert "was removed while the job was using it" in memory.trouble()
    open_memory()  # another file under the same name
    assert "RemoveIPC" in memory.trouble()


@pytest.mark.slow
def test_a_refused_opener_does_not_keep_the_memory_alive(open_memory: Open) -> None:
    owner = open_memory(a_layout(seed=3))
    with pytest.raises(ShardMemoryError):
        open_memory()
    owner.close()
    assert not owner.folder.exists()


def test_difference_says_what_differs() -> None:
    assert difference({"a": 1, "b": {"x": 1}}, {"a": 2, "b": {"x": 1, "y": 2}}) == "a 1, here 2; b['y'] None, here 2"


# --- life ------------------------------------------------------------------------------------------------------------


def test_the_last_one_out_removes_the_folder(open_memory: Open) -> None:
    first, second = open_memory(), open_memory()
    first.close()
    assert first.folder.exists()
    second.close()
    second.close()
    assert not first.folder.exists()


def test_memory_can_be_left_for_a_restart(open_memory: Open) -> None:
    memory = open_memory()
    memory.init_shard(0, step=3)
    memory.close(remove=False)
    again = open_memory()
    assert again.marks().finished[0] == 3


def test_closing_after_somebody_removed_the_folder_is_no_trouble(open_memory: Open) -> None:
    memory = open_memory()
    for file in memory.folder.iterdir():
        file.unlink()
    memory.folder.rmdir()
    memory.close()


# --- waiting for a writer --------------------------------------------------------------------------------------------


def test_waiting_ends_when_the_step_is_finished(open_memory: Open) -> None:
    memory = open_memory()
    memory.finish(np.arange(4), 3)
    memory.wait_finished(np.arange(4), 3, timeout_s=0.001)
    memory.wait_finished(np.empty(0, dtype=np.int64), 9, timeout_s=0.001)


@pytest.mark.parametrize("order", [[1, 2], [2, 1]])
def test_a_writer_wakes_who_waits_for_its_shards(
    open_memory: Open, monkeypatch: pytest.MonkeyPatch, order: list[int]
) -> None:
    memory, due = open_memory(), list(order)
    slept: list[int] = []
    woken: list[int] = []

    def sleep(address: int, value: int, timeout_s: float) -> None:
        assert ctypes.c_uint32.from_address(address).value == value
        slept.append(address)
        memory.finish(np.array([due.pop(0)]), 7)
        if not due:
            assert ctypes.c_uint32.from_address(address).value == 7

    monkeypatch.setattr(futex, "wait", sleep)
    monkeypatch.setattr(futex, "wake", woken.append)
    memory.wait_finished(np.array([1, 2]), 7, timeout_s=100.0)
    assert len(slept) == len(woken) == 2
    assert woken[-1] == slept[-1]


def test_waiting_for_a_writer_that_is_stuck_times_out(open_memory: Open) -> None:
    memory = open_memory()
    memory.begin(np.array([2]), 1)
    message = rf"shard 2: process {os.getpid()} did not finish step 1 \(last finished 0\)"
    with pytest.raises(TimeoutError, match=message):
        memory.wait_finished(np.array([2]), 1, timeout_s=0.01)


@pytest.mark.processes
def test_a_dead_predecessor_is_not_waited_for_in_vain(open_memory: Open) -> None:
    """Who serves a shard after a death says so before anybody waits for it."""
    memory = open_memory(grace_s=30)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        dead.wait()
    memory._writer[2] = dead.pid
    memory.claim(np.array([2]))
    with pytest.raises(TimeoutError, match="did not finish step 1"):
        memory.wait_finished(np.array([2]), 1, timeout_s=0.01)


@pytest.mark.processes
def test_nobody_waits_for_a_dead_writer(open_memory: Open) -> None:
    memory = open_memory(grace_s=30)
    with subprocess.Popen([sys.executable, "-c", "pass"]) as dead:
        dead.wait()
    memory._begun[2], memory._writer[2] = 1, dead.pid
    with pytest.raises(TimeoutError, match=rf"shard 2: process {dead.pid} left, or died, before it finished step 1"):
        memory.wait_finished(np.array([2]), 1, timeout_s=60)


# --- other processes -------------------------------------------------------------------------------------------------

OPEN = """
import sys, signal
from pathlib import Path
import numpy as np
sys.path.insert(0, {here!r})
import test_shard_memory
from gba_hvd.shm.shard_memory import ShardMemory
memory = ShardMemory.create_or_open(Path({base!r}), "job", test_shard_memory.a_layout(), {grace_s})
for shard in range(4):
    memory.init_shard(shard, 0)
memory.begin(np.array([2]), 1)
print("open", flush=True)
sys.stdin.read()
memory.close()
"""


class Worker:
    """Another process that has the memory open and is in the middle of writing shard 2."""

    def __init__(self, base: Path, grace_s: float) -> None:
        code = OPEN.format(here=str(Path(__file__).parent), base=str(base), grace_s=grace_s)
        self.process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"open\n"

    def end(self, how: int | None = None) -> None:
        if how is not None and self.process.poll() is None:
            self.process.send_signal(how)
        self.process.communicate(timeout=30)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []

    def make(grace_s: float = 0.0) -> Worker:
        made.append(Worker(tmp_path, grace_s))
        return made[-1]

    yield make
    for one in made:
        one.end(signal.SIGKILL)


def until(condition: Callable[[], Any], limit_s: float = 60) -> bool:
    deadline = time.monotonic() + limit_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(condition())


def keepers(folder: Path) -> list[str]:
    """The processes that watch over a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"reaper.py" in line and str(folder).encode() in line:
                found.append(entry.name)
    return found


@pytest.mark.processes
def test_the_memory_of_a_killed_job_is_removed_by_its_keeper(tmp_path: Path, worker: Callable[..., Worker]) -> None:
    folder = job_folder(tmp_path, "job")
    one = worker()
    assert len(keepers(folder)) == 1
    one.end(signal.SIGKILL)
    assert until(lambda: not folder.exists())
    assert until(lambda: not keepers(folder))


@pytest.mark.processes
def test_the_keeper_waits_out_the_grace_so_that_a_restart_finds_the_rows(
    tmp_path: Path, worker: Callable[..., Worker], open_memory: Open
) -> None:
    worker(grace_s=600).end(signal.SIGKILL)
    again = open_memory()
    marks = again.marks()
    assert marks.ready.tolist() == [1, 1, 1, 1]
    assert marks.begun[2] > marks.finished[2]
    again.close()
    assert until(lambda: not keepers(again.folder))


def test_the_keeper_keeps_what_somebody_uses_and_removes_it_after_the_grace(
    open_memory: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Enough(Exception):
        pass

    class Clock:
        """One second a round."""

        def __init__(self, rounds: int) -> None:
            self.now_s, self.left = 0.0, rounds

        def sleep(self, seconds: float) -> None:
            if self.left == 0:
                raise Enough
            self.now_s, self.left = self.now_s + 1.0, self.left - 1

        def monotonic(self) -> float:
            return self.now_s

    def keep(rounds: int) -> None:
        monkeypatch.setattr(reaper, "time", Clock(rounds))
        reaper.keep(memory.folder, grace_s=5.0)

    memory = open_memory()
    with pytest.raises(Enough):
        keep(rounds=100)
    memory.close(remove=False)  # as if it had been killed
    with pytest.raises(Enough):
        keep(rounds=5)
    assert memory.folder.exists()
    keep(rounds=6)
    assert not memory.folder.exists()


@pytest.mark.processes
def test_a_worker_stopped_in_the_middle_of_writing_is_ended(
    tmp_path: Path, worker: Callable[..., Worker], open_memory: Open
) -> None:
    one = worker(grace_s=60)
    memory = open_memory()
    one.process.send_signal(signal.SIGSTOP)
    memory.end_old_writers(members={one.process.pid})
    assert one.process.poll() is None
    memory.end_old_writers(members={os.getpid()})
    assert one.process.wait(timeout=30) == -signal.SIGKILL


@pytest.mark.processes
def test_a_process_that_only_has_the_number_of_a_dead_writer_is_left_alone(open_memory: Open) -> None:
    memory = open_memory(grace_s=60)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        memory._begun[2], memory._writer[2] = 1, bystander.pid
        memory.end_old_writers(members={os.getpid()})
        assert bystander.poll() is None
        bystander.communicate(b"\n", timeout=30)
    assert bystander.returncode == 0


def test_a_process_releases_the_shards_that_no_other_has_claimed(open_memory: Open) -> None:
    """A server that was stopped while workers continued without it."""
    memory = open_memory()
    shards = np.array([0, 1])
    memory.claim(shards)
    memory._writer[1] = os.getppid()
    memory.release(shards)
    assert memory._writer[shards].tolist() == [shard_memory._NO_PROCESS, os.getppid()]


def test_what_a_dead_job_left_is_cleared_and_what_somebody_lives_in_is_not(open_memory: Open, tmp_path: Path) -> None:
    memory = open_memory(grace_s=60.0)
    remove_orphaned_memory(tmp_path, "job")
    assert memory.folder.exists()
    memory.close(remove=False)  # as if it had been killed
    assert memory.folder.exists()
    remove_orphaned_memory(tmp_path, "job")
    assert not memory.folder.exists()
    remove_orphaned_memory(tmp_path, "job")  # nothing there is no error


LOCKS = """1: FLOCK  ADVISORY  WRITE 41 00:1b:139601 0 EOF
2: FLOCK  ADVISORY  READ 42 fe:10:139601 0 EOF
2: -> FLOCK  ADVISORY  WRITE 43 fe:10:139601 0 EOF
3: POSIX  ADVISORY  WRITE 44 fe:10:139601 0 EOF
4: FLOCK  ADVISORY  READ 45 fe:10:139602 0 EOF
"""


@pytest.mark.parametrize(("device", "owners"), [((0, 27), {41}), ((254, 16), {42}), ((0, 28), set())])
def test_a_file_of_another_file_system_with_the_same_inode_has_other_owners(
    device: tuple[int, int], owners: set[int]
) -> None:
    assert owners_in(LOCKS, device, 139601) == owners


def test_who_holds_a_lock_is_found_on_each_file_system(tmp_path: Path) -> None:
    for folder in (tmp_path, Path("/dev/shm")):
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            assert lock_owners(Path(file.name)) == set()
            fcntl.flock(file, fcntl.LOCK_SH)
            assert lock_owners(Path(file.name)) == {os.getpid()}
