"""Operations of some workers, over real connections; workers are threads, or processes where one hangs."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError

from gba_hvd.comm import groups
from gba_hvd.comm.groups import Group, NotConnected, form_group
from gba_hvd.errors import GbaError
from tests.unit.thread_world import TIMEOUT_S, Meeting, ThreadWorld

LOST = (GbaError, HorovodInternalError)  # the second where another test has imported Horovod


def on_all(size: int, work: Callable[[ThreadWorld], Any]) -> list[Any]:
    """What `work` returned or raised on each rank."""
    meeting, found = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadWorld(meeting, rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_S)
        assert not thread.is_alive()
    return found


def meet(world: ThreadWorld) -> None:
    """Returns when all workers have come."""
    world.gather("meet", np.zeros(1, dtype=np.int64))


def vector(rank: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_ranks_of_a_group_sum_and_all_have_the_same_bits(dtype: torch.dtype) -> None:
    ranks, sizes = [0, 2, 3], [1, 1000, 7]

    def work(world: ThreadWorld) -> list[torch.Tensor] | None:
        group = form_group("commit", world, ranks)
        if group is None:
            return None
        found = []
        for size in sizes:
            values = vector(world.rank, size, dtype)
            group.sum_(values)
            found.append(values)
        group.close()
        return found

    of_0, of_1, *others = on_all(4, work)
    assert of_1 is None
    for values, size, *more in zip(of_0, sizes, *others, strict=True):
        torch.testing.assert_close(values, sum(vector(rank, size, dtype) for rank in ranks))
        assert all(torch.equal(values, one) for one in more)


@pytest.mark.parametrize("is_known", [False, True], ids=["counts go ahead", "counts are known"])
def test_every_rank_gets_what_each_sends_it_bit_for_bit(is_known: bool) -> None:
    sizes = np.array([[[0, 3, 1], [2, 0, 0], [0, 0, 7]], [[0] * 3] * 3, [[9, 0, 4000], [1, 1, 1], [0, 100_000, 0]]])
    rng = np.random.default_rng(0)
    sent = [[[rng.bytes(4 * n) for n in of] for of in step] for step in sizes]

    def work(world: ThreadWorld) -> list[list[bytes]]:
        group, me = form_group("rows", world, range(3)), world.rank
        assert group is not None
        found = []
        for step, n in zip(sent, sizes, strict=True):
            words = np.frombuffer(b"".join(step[me]), np.float32)
            received, counts = group.alltoall("rows", words, n[me], n[:, me] if is_known else None)
            assert counts.tolist() == n[:, me].tolist()
            found.append([part.tobytes() for part in np.split(received, np.cumsum(counts)[:-1])])
        group.close()
        return found

    for rank, found in enumerate(on_all(3, work)):
        assert found == [[of[rank] for of in step] for step in sent]


@pytest.mark.parametrize("is_known", [False, True], ids=["counts go ahead", "counts are known"])
@pytest.mark.parametrize("late", range(3))
def test_an_all_to_all_of_nothing_ends_when_all_have_come(late: int, is_known: bool) -> None:
    """`row_squares` counts on it, and that messages of the ranks of one host are empty."""
    others_wait, has_come = threading.Barrier(3), threading.Event()

    def work(world: ThreadWorld) -> bool:
        group = form_group("rows", world, range(3))
        assert group is not None
        if world.rank == late:
            others_wait.wait(TIMEOUT_S)
            has_come.set()
        else:
            wait_until = world.wait_until

            def wait(name: str, is_done: Callable[[], bool], doze: Callable[[float], None], ranks: Any) -> None:
                if not has_come.is_set():
                    assert not is_done()
                    others_wait.wait(TIMEOUT_S)
                wait_until(name, is_done, doze, ranks)

            world.wait_until = wait  # type: ignore[method-assign]
        nothing = np.zeros(3, np.int64)
        group.alltoall("rows", np.empty(0, np.float32), nothing, nothing if is_known else None)
        return has_come.is_set()

    assert on_all(3, work) == [True] * 3


@pytest.mark.parametrize("comes", [True, False], ids=["the other one comes", "the other one leaves"])
def test_a_wait_ends_with_the_operation_and_not_when_it_is_looked_at_again(comes: bool) -> None:
    dozes = threading.Event()

    def wait(name: str, is_done: Callable[[], bool], doze: Callable[[float], None], ranks: Any) -> None:
        while not is_done():
            dozes.set()
            doze(10 * TIMEOUT_S)

    def work(world: ThreadWorld) -> None:
        group = form_group("rows", world, range(2))
        assert group is not None
        if world.rank == 0:
            world.wait_until = wait  # type: ignore[method-assign]
        elif not (dozes.wait(TIMEOUT_S) and comes):
            group.close()
            return
        words = np.ones(2, np.float32)
        with contextlib.nullcontext() if comes else pytest.raises(LOST, match="a worker is gone"):
            group.alltoall("rows", words, words.astype(np.int64), words.astype(np.int64))

    assert on_all(2, work) == [None] * 2
    assert dozes.is_set()


def test_a_worker_that_leaves_ends_the_all_to_all_of_all_others() -> None:
    def work(world: ThreadWorld) -> None:
        group = form_group("rows", world, range(world.size))
        assert group is not None
        words, splits = np.ones(8, np.float32), np.full(4, 2)
        group.alltoall("rows", words, splits)
        meet(world)
        if world.rank == 0:
            group.close()
            return
        with pytest.raises(LOST, match=r"a worker is gone: [A-Z].* by peer"):
            group.alltoall("rows", words, splits)
        with pytest.raises(LOST, match="has left the group"):
            group.alltoall("rows", words, splits)

    assert on_all(4, work) == [None] * 4


def test_a_worker_that_leaves_ends_the_sum_of_all_others() -> None:
    """Also of those that share no connection with it in the sum, while others still hold the error they got."""
    kept = []

    def work(world: ThreadWorld) -> None:
        group = form_group("commit", world, range(world.size))
        assert group is not None
        values = torch.ones(1000)
        group.sum_(values)
        assert torch.equal(values, torch.full((1000,), 5.0))
        meet(world)
        if world.rank == 0:
            group.close()
            return
        with pytest.raises(LOST, match=r"a worker is gone: [A-Z].* by peer") as caught:
            group.sum_(values)
        kept.append(caught)
        with pytest.raises(LOST, match="has left the group"):
            group.sum_(values)

    assert on_all(5, work) == [None] * 5 and len(kept) == 4


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "text"), [(GbaError("this host has only IPv6 addresses"), "this host has only IPv6 addresses"),
                        (PermissionError(), "PermissionError")]
)  # fmt: skip
def test_a_worker_that_cannot_be_connected_is_named_on_all(
    rank: int, error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()

    def own_address() -> str:
        if here.rank == rank:
            raise error
        return "127.0.0.1"

    def work(world: ThreadWorld) -> Group | None:
        here.rank = world.rank
        return form_group("commit", world, [0, 1])

    monkeypatch.setattr(groups, "own_address", own_address)
    monkeypatch.setattr(groups, "_TO_CONNECT", groups.datetime.timedelta(seconds=2))
    found = on_all(3, work)
    assert [type(one) for one in found] == [NotConnected] * 3, found
    assert {str(one) for one in found} == {f"rank {rank} could not be connected: {text}"}


HANGS = """
import sys, threading, torch
from gba_hvd.comm.groups import form_group
from tests.unit.thread_world import Meeting, ThreadWorld

class Broken(Exception): pass

def wait_until(*_):
    raise Broken

def work(rank):
    world = ThreadWorld(meeting, rank)
    group = form_group("commit", world, [0, 1])
    if rank == 0:
        world.wait_until = wait_until
        values = torch.ones(100_000)
        try:
            group.sum_(values)
        except Broken:
            group.close()
            print("broken", values.sum().item())
    kept.append(group)

meeting, kept = Meeting(2), []
threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
for thread in threads: thread.start()
for thread in threads: thread.join()
del kept[:]
"""


@pytest.mark.slow
def test_a_sum_that_is_given_up_changes_nothing_and_keeps_no_process_from_its_end() -> None:
    """The other worker is there, and never comes."""
    done = subprocess.run([sys.executable, "-c", HANGS], check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "broken 100000.0\n"), done.stderr


INTERRUPTED = HANGS.replace(
    "world.wait_until = wait_until", "group._connections = Interrupting(group._connections)"
).replace(
    "def wait_until(*_):\n    raise Broken\n",
    """
class Interrupting:
    def __init__(self, connections):
        self._connections = connections
    def allreduce(self, *arguments):
        self._connections.allreduce(*arguments)
        raise Broken
""",
)


@pytest.mark.slow
def test_an_interruption_as_a_sum_begins_keeps_no_process_from_its_end() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert (done.returncode, done.stdout) == (0, "broken 100000.0\n"), done.stderr


def test_connections_are_at_one_address_and_are_probed() -> None:
    """What /proc/net says of this process while a group is there."""
    found: list[str] = []

    def work(world: ThreadWorld) -> None:
        group = form_group("commit", world, range(world.size))
        assert group is not None
        meet(world)
        if world.rank == 0:
            found.extend(sockets_of_this_process())
        meet(world)
        group.close()

    before = set(sockets_of_this_process())
    assert on_all(2, work) == [None] * 2
    fresh = [line.split() for line in found if line not in before]
    listening = [fields for fields in fresh if fields[3] == "0A"]
    assert listening and all(fields[1].startswith("0100007F:") for fields in listening)
    connected = [fields for fields in fresh if fields[3] == "01"]
    assert sum(fields[5].startswith("02:") for fields in connected) >= 2  # the timer of probes


@pytest.mark.slow
def test_what_a_group_opened_is_closed_with_it() -> None:
    def work(world: ThreadWorld) -> None:
        group = form_group("commit", world, range(world.size))
        assert group is not None
        group.sum_(torch.ones(3))
        meet(world)
        group.close()

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert on_all(3, work) == [None] * 3
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def sockets_of_this_process() -> list[str]:
    """The lines of /proc/net/tcp and tcp6."""
    mine = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            mine.add(os.readlink(link))
    lines = [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [line for line in lines if f"socket:[{line.split()[9]}]" in mine]
