"""What a job that lost all its workers left in memory: when another one resumes from it, and when it cannot."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gba_hvd
from gba_hvd.checkpoint import orphaned_memory
from gba_hvd.checkpoint.orphaned_memory import MemorySurvey, collect_state, decide_resume, found_in, survey
from gba_hvd.errors import GbaError, ShardMemoryError
from gba_hvd.ps.server.final_checkpoint import MemoryHold
from gba_hvd.shm import retained_state, shard_memory
from gba_hvd.shm.retained_state import Absence, StateRetainer, decide_retention
from gba_hvd.shm.shard_memory import ShardMemory, format_of

SETTINGS = 77
ALL = np.ones(4, dtype=bool)
NOTHING = MemorySurvey.nothing(4)
WHOLE = MemorySurvey(kept=8, generation=0, settings=SETTINGS, begun=8, ready=ALL, placed=np.ones(4, dtype=np.int64))


def half(first: bool, **more: Any) -> MemorySurvey:
    return replace(WHOLE, ready=np.array([first, first, not first, not first]), **more)


@pytest.mark.parametrize(
    ("found", "saved_step", "rank"),
    [
        ([WHOLE], 5, 0),
        ([WHOLE], 8, 0),
        ([WHOLE], -1, 0),
        ([replace(WHOLE, begun=9)], 5, 0),  # killed while a step was applied: it is computed again
        ([NOTHING, WHOLE], 5, 1),  # the second worker leads its host
        ([half(True), half(False, kept=-1)], 5, 0),
        ([half(True, kept=3), half(False)], 5, 1),  # the chief's host changed on the way: the newest state counts
        ([replace(WHOLE, generation=9, begun=400)], 5, 0),  # its servers know the step
    ],
)
def test_a_job_goes_on_from_memory_that_has_everything(found: list[MemorySurvey], saved_step: int, rank: int) -> None:
    choice = decide_resume(found, SETTINGS, saved_step)
    assert choice.rank == rank
    assert "all rows and the training state are in memory" in choice.reason
    is_again = any(one.begun == 9 for one in found)
    assert ("have step 9 already: it is computed again" in choice.reason) is is_again


@pytest.mark.parametrize(
    ("found", "saved_step", "why"),
    [
        ([NOTHING, NOTHING], 5, ""),
        ([half(True)], 5, "shards [2, 3]"),
        ([replace(WHOLE, kept=-1)], 5, "not kept there: no step was over yet when the job was killed"),
        ([replace(WHOLE, kept=-1, absence=Absence.COST)], 5, "not kept there: writing it took more of a step"),
        ([replace(WHOLE, kept=-1, absence=Absence.NO_ROOM)], 5, "not kept there: it had no room"),
        ([replace(WHOLE, kept=-1, absence=Absence.SHARE_IS_0)], 5, "(retain_state_share=0) was given"),
        ([half(True, kept=-1), half(False, kept=-1, absence=Absence.COMPRESSION)], 5, "gradients are compressed"),
        ([replace(WHOLE, settings=78)], 5, "other settings"),
        ([replace(WHOLE, begun=10)], 5, "of step 8, the rows are of step 10"),
        ([replace(WHOLE, begun=7)], 5, "of step 8, the rows are of step 7"),
        ([WHOLE], 9, "of step 8, the newest checkpoint of step 9"),
    ],
)
def test_what_is_not_all_there_is_reported_and_not_used(found: list[MemorySurvey], saved_step: int, why: str) -> None:
    choice = decide_resume(found, SETTINGS, saved_step)
    assert choice.rank is None
    assert why in choice.reason and bool(choice.reason) == bool(why)


def test_what_is_found_travels_as_numbers() -> None:
    for one in (WHOLE, NOTHING, half(False, settings=-(2**62)), half(True, absence=Absence.COST)):
        again = MemorySurvey.of_row(one.row())
        assert again.ready.tolist() == one.ready.tolist()
        assert again.placed.tolist() == one.placed.tolist()
        assert replace(again, ready=ALL, placed=ALL) == replace(one, ready=ALL, placed=ALL)


def test_a_host_that_others_went_on_without_has_nothing_to_say() -> None:
    """All its shards were placed again since. Its state may be of a later step, if the others went back."""
    numbers = np.full(4, 2**32)
    others, gone = replace(WHOLE, kept=5, begun=5, placed=numbers), half(False, kept=8, begun=8)
    for found in ([others, gone], [gone, others]):
        choice = decide_resume(found, SETTINGS, saved_step=3)
        assert choice.rank == found.index(others) and "of step 5" in choice.reason
    assert decide_resume([replace(others, ready=~gone.ready), gone], SETTINGS, 3).rank is not None, "shards of its own"
    assert decide_resume([half(True, placed=numbers), replace(gone, ready=half(True).ready)], SETTINGS, 3).rank is None


# --- the training state in memory ------------------------------------------------------------------------------------


def test_the_state_is_kept_as_of_the_newest_step(tmp_path: Path) -> None:
    assert retained_state.read(tmp_path) is None
    keeper = StateRetainer(tmp_path, SETTINGS, share=1.0)
    for step in (1, 2):
        assert keeper.keep(step, 0, lambda: b"state of %d" % step) is None  # noqa: B023
    assert keeper.keep(2, 0, lambda: pytest.fail("the same step is not written again")) is None
    assert retained_state.read(tmp_path) == retained_state.RetainedState(2, 0, SETTINGS, b"state of 2")
    keeper.keep(2, 5, lambda: b"an asynchronous mode begins at the same step")
    found = retained_state.read(tmp_path)
    assert found is not None and found.generation == 5


def test_keeping_stops_when_it_takes_too_much_of_a_step(tmp_path: Path) -> None:
    now = [0.0]

    def state() -> bytes:
        now[0] += 0.01
        return b"state"

    keeper = StateRetainer(tmp_path, SETTINGS, share=0.05, clock=lambda: now[0])
    for step in range(1, 50):
        now[0] += 0.09
        if stopped := keeper.keep(step, 0, state):
            break
    assert step == 21
    assert (
        "10.0 ms of a step's 100.0 ms, more than the 5% allowed (CheckpointCallback(retain_state_share=0.05))"
        in stopped.reason
    )
    assert retained_state.read(tmp_path) is None and retained_state.absence(tmp_path) == Absence.COST
    assert keeper.keep(99, 0, state) is None and retained_state.read(tmp_path) is None


def test_what_is_too_dear_between_two_steps_is_kept_where_an_asynchronous_mode_begins(tmp_path: Path) -> None:
    now = [0.0]

    def state() -> bytes:
        now[0] += 0.01
        return b"state"

    keeper = StateRetainer(tmp_path, SETTINGS, share=0.05, clock=lambda: now[0])
    assert any(keeper.keep(step, 0, state) for step in range(1, 50))
    for step in range(50, 80):
        assert keeper.keep(step, 4, state) is None
    found = retained_state.read(tmp_path)
    assert found is not None and (found.step, found.generation) == (79, 4)
    assert keeper.keep(80, 0, state) is None
    assert retained_state.read(tmp_path) is None, "rows have gone on since, in allreduce mode"
    assert retained_state.absence(tmp_path) == Absence.COST


def test_keeping_goes_on_while_it_is_cheap() -> None:
    assert decide_retention([0.001] * 9 + [5.0], [0.1] * 10, share=0.02, n_bytes=10**6).keep
    assert not decide_retention([0.003] * 10, [0.1] * 10, share=0.02, n_bytes=10**6).keep


@pytest.mark.parametrize(("n_bytes", "is_notable"), [(10**6, False), (10**8, True)])
def test_stopping_is_notable_where_the_state_is_large_and_not_where_steps_are_tiny(
    n_bytes: int, is_notable: bool
) -> None:
    found = decide_retention([0.02] * 20, [0.5] * 20, share=0.02, n_bytes=n_bytes)
    assert (found.keep, found.is_notable) == (False, is_notable)


@pytest.mark.parametrize(
    ("share", "is_compressed", "why"),
    [(0.0, False, Absence.SHARE_IS_0), (1.0, True, Absence.COMPRESSION), (0.0, True, Absence.COMPRESSION)],
)
def test_what_is_never_kept_is_noted_with_its_reason(
    tmp_path: Path, share: float, is_compressed: bool, why: Absence
) -> None:
    keeper = StateRetainer(tmp_path, SETTINGS, share=share, is_compressed=is_compressed)
    assert retained_state.absence(tmp_path) == Absence.NO_STEP
    for step in (1, 2):
        assert keeper.keep(step, 0, lambda: pytest.fail("it is not needed")) is None
    assert retained_state.read(tmp_path) is None and retained_state.absence(tmp_path) == why


def test_a_state_without_room_is_notable_and_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gba_hvd.shm.retained_state.SnapshotFile.write", full)
    stopped = StateRetainer(tmp_path, SETTINGS, share=1.0).keep(1, 0, lambda: b"state")
    assert stopped is not None and stopped.is_notable and "No space left on device" in stopped.reason
    assert retained_state.absence(tmp_path) == Absence.NO_ROOM


def test_a_state_that_was_overwritten_is_noticed(tmp_path: Path) -> None:
    StateRetainer(tmp_path, SETTINGS, share=1.0).keep(1, 0, lambda: b"state")
    data = bytearray((tmp_path / "kept").read_bytes())
    data[data.index(b"state")] ^= 1
    (tmp_path / "kept").write_bytes(data)
    with pytest.raises(ShardMemoryError, match="damaged"):
        retained_state.read(tmp_path)


def test_a_state_of_an_asynchronous_mode_is_worth_nothing_without_its_servers(tmp_path: Path) -> None:
    state = retained_state.RetainedState(3, 9, SETTINGS, b"")
    with pytest.raises(GbaError, match="what its servers were serving is gone"):
        collect_state(tmp_path, "job", state, None, [], [])
    assert collect_state(tmp_path, "job", replace(state, generation=0, state=b"x"), None, [], []) == (b"x", 3)


# --- finding it ------------------------------------------------------------------------------------------------------


@pytest.fixture
def memory(make_tables: Callable[..., gba_hvd.EmbeddingTables]) -> ShardMemory:
    found = make_tables({"user": (20, 4)}).memory
    assert found is not None
    return found


def test_only_a_memory_of_this_model_in_which_nobody_lives_is_looked_at(memory: ShardMemory, tmp_path: Path) -> None:
    assert not survey(memory.folder, memory.layout, 0.1)  # we live in it
    memory.close(remove=False)
    assert survey(memory.folder, memory.layout, 0.1)
    about = memory.folder / "memory.json"
    about.write_text(json.dumps({"format": format_of(memory.layout), **replace(memory.layout, seed=99).describe()}))
    assert not survey(memory.folder, memory.layout, 0.1)
    assert not survey(tmp_path / "absent", memory.layout, 0.1)


def test_what_is_in_a_memory_is_its_rows_and_its_state(memory: ShardMemory) -> None:
    found, state = found_in(memory)
    assert (found.kept, found.begun, found.ready.tolist(), state) == (-1, 0, [True] * 3, None)
    StateRetainer(memory.folder, SETTINGS, share=0.0).keep(4, 0, lambda: b"state")
    assert found_in(memory)[0].absence == Absence.SHARE_IS_0
    StateRetainer(memory.folder, SETTINGS, share=1.0).keep(4, 0, lambda: b"state")
    memory.begin(np.array([1]), 5)
    found, state = found_in(memory)
    assert (found.kept, found.begun, found.settings) == (4, 5, SETTINGS)
    assert state is not None and state.state == b"state"


# --- a last checkpoint -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_job_is_refused_beside_a_process_that_is_not_its_own(memory: ShardMemory) -> None:
    """The memory is open in this process."""
    words = rf"a running job \(process {os.getpid()}\) uses .*GBA_HVD_JOB_ID"
    with pytest.raises(ShardMemoryError, match=words):
        orphaned_memory.refuse_if_in_use(memory.folder, {1}, "")
    with pytest.raises(ShardMemoryError, match=words):
        orphaned_memory.refuse_if_in_use(memory.folder, {1}, "another")


@pytest.mark.slow
@pytest.mark.parametrize(("there", "words"), [(1, "a running job in another container .* pid namespace"), (0, "")])
def test_a_job_is_refused_beside_processes_that_have_no_number_here(
    memory: ShardMemory, monkeypatch: pytest.MonkeyPatch, there: int, words: str
) -> None:
    """The lock is held, but the kernel names no process: those of other containers, for one."""
    monkeypatch.setattr(shard_memory, "lock_owners", lambda path: set())
    about = json.loads((memory.folder / "memory.json").read_text())
    about["host"]["processes"] += there
    (memory.folder / "memory.json").write_text(json.dumps(about))
    with pytest.raises(ShardMemoryError, match=f"{words or 'a running job'}.* uses .*GBA_HVD_JOB_ID") as refused:
        orphaned_memory.refuse_if_in_use(memory.folder, {os.getpid()}, "")
    assert ("another container" in str(refused.value)) == bool(there)
    memory.close(remove=False)
    orphaned_memory.refuse_if_in_use(memory.folder, {os.getpid()}, "")


def test_a_job_is_not_refused_beside_its_own_processes_a_last_checkpoint_or_none(memory: ShardMemory) -> None:
    folder = memory.folder
    orphaned_memory.refuse_if_in_use(folder, {os.getpid()}, "")
    memory.give_to("mine")
    orphaned_memory.refuse_if_in_use(folder, {1}, "mine")
    mark = folder / orphaned_memory.MARK.replace("*", "0")
    mark.touch()
    orphaned_memory.refuse_if_in_use(folder, {1}, "")
    mark.unlink()
    memory.close(remove=False)
    orphaned_memory.refuse_if_in_use(folder, {1}, "")
    orphaned_memory.refuse_if_in_use(folder.parent / "gba-hvd-absent", {1}, "")


@pytest.mark.slow
def test_a_server_holds_the_memory_once_when_nobody_has_lived_there_for_long_enough(memory: ShardMemory) -> None:
    now = [0.0]

    def is_due_at(second: float) -> bool:
        now[0] = second
        return hold.is_due()

    hold = MemoryHold(memory.folder, 0, after_s=10.0, clock=lambda: now[0])
    assert not is_due_at(0.0) and not is_due_at(100.0)  # somebody lives
    memory.close(remove=False)
    assert not is_due_at(101.0) and not is_due_at(110.5)
    assert is_due_at(111.5)
    assert hold.begin(limit_s=60.0) and hold.is_active and not hold.is_late
    with open(memory.folder / "alive") as alive, pytest.raises(BlockingIOError):
        fcntl.flock(alive, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the keeper waits
    assert not survey(memory.folder, memory.layout, 0.1)  # and so does whoever starts the job again
    now[0] = 172.0
    assert hold.is_late
    hold.end()
    hold.end()
    assert survey(memory.folder, memory.layout, 0.1)
    assert not is_due_at(1000.0)  # once is enough, until somebody lives there again


def test_a_memory_that_is_gone_is_not_held(tmp_path: Path) -> None:
    hold = MemoryHold(tmp_path, 0, after_s=0.0)
    assert not hold.is_due() and not hold.begin(limit_s=1.0)


def test_a_wait_for_a_final_checkpoint_is_reported_with_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def survey(folder: Path, timeout_s: float) -> None:
        unused: Any = None
        orphaned_memory.survey(folder, unused, timeout_s)

    orphaned_memory.await_last_checkpoint(tmp_path, 70.0)
    assert not caplog.records
    mark = tmp_path / orphaned_memory.MARK.replace("*", "0")
    for wait in (orphaned_memory.await_last_checkpoint, survey):
        mark.touch()
        monkeypatch.setattr("time.sleep", lambda _: mark.unlink())
        monkeypatch.setattr(orphaned_memory, "no_process_lives", lambda _: False)
        caplog.clear()
        wait(tmp_path, 70.0)
        (waits,) = [record.getMessage() for record in caplog.records]
        assert waits.startswith("waiting for at most 70 s: a server of the job before saves a final checkpoint")
