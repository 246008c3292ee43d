"""What a job is reported to have ended with, and where the reason comes from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gba_hvd import BadInput, GBACallback
from gba_hvd.elastic import endings
from gba_hvd.errors import LastCheckpointFailed, NonFiniteGradient, ShardMemoryError, StateMismatch, WorldLost
from gba_hvd.shm import host_identity
from gba_hvd.training.job_state import LocalHost
from gba_hvd.training.left_epoch import LeftEpoch, LeftEpochs
from recovery.errors import StoreError


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    """Rank 0 of two on a host; the other process is this one until a test says otherwise."""
    memory = SimpleNamespace(folder=tmp_path, is_closed=False, trouble=lambda: "")
    world = SimpleNamespace(size=2, rank=0)
    return SimpleNamespace(
        model=SimpleNamespace(tables=SimpleNamespace(memory=memory, config=SimpleNamespace(job_id="", grace_s=20.0))),
        host=LocalHost(neighbours={1: os.getpid()}),
        world=world, progress=SimpleNamespace(step=7), folder=tmp_path,
        participant=lambda kind: None,
    )  # fmt: skip


def checkpoints(saved_step: int, resume: bool = True) -> Any:
    callback = SimpleNamespace(resume=resume, final_checkpoint_s=60.0)
    return SimpleNamespace(schedule=SimpleNamespace(saved_step=saved_step), callback=callback)


@pytest.fixture
def dead() -> int:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", ""]) as process:
        process.wait(60)
    return process.pid


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SystemExit(0), "FINISHED"),
        (SystemExit(None), "FINISHED"),
        (SystemExit(3), "FAILED"),
        (SystemExit("no"), "FAILED"),
        (KeyboardInterrupt(), "KILLED"),
        (WorldLost("gone"), "FAILED"),
        (WorldLost("gone", "KILLED"), "KILLED"),
        (LastCheckpointFailed("full"), "NOT_SAVED"),
        (RuntimeError(), "FAILED"),
    ],
    ids=repr,
)
def test_status(error: BaseException, status: str) -> None:
    assert endings.status_of(error) == status


@pytest.mark.slow
@pytest.mark.processes
def test_a_refused_input_is_one_traceback_that_ends_with_its_sentence() -> None:
    script = (
        "from gba_hvd import BadInput\n"
        "from gba_hvd.elastic import endings\n"
        "endings.show_ends_briefly(lambda: False)\n"
        "try:\n"
        "    {}['ids']\n"
        "except KeyError as error:\n"
        "    raise BadInput('a batch has no ids: name them') from error\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr.count("Traceback")) == (1, 1)
    assert ended.stderr.endswith("BadInput: a batch has no ids: name them\n") and "KeyError" not in ended.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_refusal_without_a_line_of_the_script_is_one_line() -> None:
    script = (
        "import sys\n"
        "from gba_hvd import BadInput\n"
        "from gba_hvd.elastic import endings, resume_fit\n"
        "endings.show_ends_briefly(lambda: False)\n"
        "try:\n"
        "    resume_fit._refuse('the checkpoint', 'another model')\n"
        "except BadInput as error:\n"
        "    sys.excepthook(BadInput, error, error.__traceback__.tb_next)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr
    assert ended.stderr.startswith("BadInput: the checkpoint is of a job with another model: ")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(("where", "n_tracebacks"), [("_sync", 0), ("register_callbacks", 1)])
def test_a_refusal_while_the_world_forms_is_one_line_under_a_line_of_the_script_too(
    where: str, n_tracebacks: int
) -> None:
    script = (
        "from gba_hvd import BadInput\n"
        "from gba_hvd.elastic import endings, torch_state\n"
        "endings.show_ends_briefly(lambda: False)\n"
        f"code = \"def {where}(): raise BadInput('another dim')\"\n"
        "exec(compile(code, torch_state.__file__, 'exec'))\n"
        f"{where}()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr.count("Traceback")) == (1, n_tracebacks), ended.stderr
    assert ended.stderr.endswith("BadInput: another dim\n")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    ("call", "n_tracebacks"), [("read()", 0), ("all_or_none(SoloWorld(), False, 'read', read)", 1)]
)
def test_a_store_that_fails_is_one_traceback_or_one_line_where_the_script_s_function_had_not_begun(
    tmp_path: Path, call: str, n_tracebacks: int
) -> None:
    (tmp_path / "blobs/000017-00000003/0004").mkdir(parents=True)  # no file that could be read
    script = (
        "from functools import partial\n"
        "from gba_hvd.comm.collectives import SoloWorld, all_or_none\n"
        "from gba_hvd.elastic import endings\n"
        "from recovery.storage.local_store import LocalStore\n"
        "endings.show_ends_briefly(lambda: False)\n"
        f"get = partial(LocalStore({str(tmp_path)!r}).get, 'blobs/000017-00000003/0004')\n"
        "def read(): return get()\n"
        f"{call.replace('read()', 'get()')}\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stderr.count("Traceback")) == (1, n_tracebacks), ended.stderr
    assert "StoreError: " in ended.stderr.splitlines()[-1] and "000017-00000003/0004" in ended.stderr


@pytest.mark.slow
@pytest.mark.processes
def test_a_worker_that_ends_because_of_another_one_shows_one_line() -> None:
    script = (
        "from gba_hvd.errors import WorldLost\n"
        "from gba_hvd.elastic import endings\n"
        "endings.show_ends_briefly(lambda: False)\n"
        "raise WorldLost('the worker of rank 0 could not resume')\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "WorldLost: the worker of rank 0 could not resume"
    assert "Traceback" not in ended.stderr


def test_the_process_of_the_rank_that_failed_goes_first(engine: Any) -> None:
    engine.host.neighbours[0] = 4711
    found = endings.explained(engine, WorldLost("the worker of rank 0 could not resume", rank=0))
    assert isinstance(found, WorldLost) and found.pid == 4711
    found = endings.explained(engine, WorldLost("that of rank 9, on another host, could not", rank=9))
    assert isinstance(found, WorldLost) and found.pid is None


def test_sigterm_is_this_workers_own_end_while_its_neighbours_live(engine: Any) -> None:
    error = KeyboardInterrupt(endings.SIGTERM)
    assert endings.explained(engine, error) is error
    assert "a worker of this world of 2 was lost" in str(endings.world_lost(engine))


def test_a_world_that_is_lost_to_the_memory_limit_says_so(engine: Any) -> None:
    engine.host.n_kills -= 1
    assert "The kernel has killed 1 process of this container or service" in str(endings.world_lost(engine))
    assert "The log of the worker that ended first says why" in str(endings.world_lost(engine))


def test_a_neighbour_that_is_gone_without_a_note_was_killed(engine: Any, dead: int) -> None:
    engine.host.neighbours[1] = dead
    reported = endings.explained(engine, KeyboardInterrupt(endings.SIGTERM))
    assert isinstance(reported, WorldLost) and endings.status_of(reported) == "FAILED"
    assert f"rank 1 (process {dead}) was killed, or died without a word" in str(reported)
    ctrl_c = KeyboardInterrupt()
    assert endings.explained(engine, ctrl_c) is ctrl_c


def test_sigterm_before_the_memory_is_there_is_an_interruption(engine: Any, dead: int) -> None:
    """Nobody can leave a note then, so who is gone may have been interrupted as well."""
    engine.model.tables.memory, engine.host.neighbours[1] = None, dead
    error = KeyboardInterrupt(endings.SIGTERM)
    assert endings.explained(engine, error) is error
    assert "was killed" in str(endings.cause_elsewhere(engine)), "where nothing was interrupted"


@pytest.mark.parametrize(
    ("found", "rank", "begins"),
    [
        (None, 0, "it begins at step 0, since it has no CheckpointCallback. In"),
        (checkpoints(-1), 0, "it begins at step 0, since no checkpoint has been saved yet. In"),
        (checkpoints(1200), 0, "it resumes from its newest checkpoint, of step 1,200. In"),
        (checkpoints(1200, resume=False), 0, "it begins at step 0, since CheckpointCallback(resume=False) reads no"),
        (
            checkpoints(-1),
            1,
            "it resumes from its newest checkpoint, or begins at step 0 if none has been saved yet. In",
        ),
    ],
)
def test_where_a_job_that_lost_a_worker_begins_again(
    found: Any, rank: int, begins: str, engine: Any, dead: int
) -> None:
    engine.participant, engine.world.rank, engine.host.neighbours[1] = lambda kind: found, rank, dead
    for error in (endings.world_lost(engine), endings.cause_elsewhere(engine)):
        assert f". Start the job again: {begins}" in str(error)


@pytest.mark.parametrize(
    ("job_id", "saved_step", "begins"),
    [
        ("", -1, "it begins at step 0, since no checkpoint has been saved yet, unless its servers save a last one when "
         "all workers have ended. In"),
        ("ctr", -1, "it resumes from step 7 if it comes within 20 s of the end, while that is kept in memory, else it "
         "begins at step 0, since no checkpoint has been saved yet, unless its servers save a last one when all "
         "workers have ended. In"),
        ("", 4, "it resumes from step 7 if it comes within 20 s of the end, while that is kept in memory, else it "
         "resumes from its newest checkpoint, of step 4. In"),
    ],
    ids=["nothing names the memory", "a job of a name", "its checkpoint names the memory"],
)  # fmt: skip
def test_a_job_that_lost_a_worker_says_what_is_kept_and_may_yet_be_saved(
    job_id: str, saved_step: int, begins: str, engine: Any, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_identity, "is_of_a_container", lambda pid: False)
    (engine.folder / "kept").touch()
    engine.model.tables.config.job_id, engine.host.server = job_id, object()
    engine.participant, engine.host.neighbours[1] = lambda kind: checkpoints(saved_step), dead
    for error in (endings.world_lost(engine), endings.cause_elsewhere(engine)):
        assert f". Start the job again: {begins}" in str(error)


@pytest.mark.parametrize(
    ("error", "is_met_again"),
    [
        (BadInput("day.parquet, row 7: inf"), True),
        (StateMismatch("epoch 5 stands at step 15"), True),
        (NonFiniteGradient("nan"), True),
        (WorldLost("rank 0 ended first", to_repair=True), True),
        (WorldLost("rank 0 was killed"), False),
        (StoreError("no answer"), False),
        (ShardMemoryError("no room"), False),
        (RuntimeError("of CUDA"), False),
        (None, False),
    ],
    ids=repr,
)
def test_an_error_that_the_same_command_meets_again(error: BaseException | None, is_met_again: bool) -> None:
    assert endings.is_to_repair(error) == is_met_again


def test_where_a_neighbour_met_what_is_to_be_repaired_that_comes_first(engine: Any) -> None:
    endings.leave_note(engine, "FAILED", BadInput("day.parquet, row 7: inf"))
    cause = endings.cause_elsewhere(engine)
    assert isinstance(cause, WorldLost) and cause.to_repair
    assert str(cause).endswith(". When that is repaired, start the job again: it begins at step 0, since it has no Chec"
                               "kpointCallback")  # fmt: skip
    endings.leave_note(engine, "FAILED", ConnectionError("reset"))
    cause = endings.cause_elsewhere(engine)
    assert isinstance(cause, WorldLost) and not cause.to_repair and ". Start the job again: " in str(cause)


def test_a_neighbour_that_left_a_note_is_the_cause(engine: Any) -> None:
    endings.leave_note(engine, "FAILED", ValueError("bad row"))
    reported = endings.explained(engine, KeyboardInterrupt(endings.SIGTERM))
    assert endings.status_of(reported) == "FAILED"
    assert "ended first (ValueError: bad row)" in str(reported)


def test_a_neighbour_whose_function_returned_within_an_epoch_is_the_cause(engine: Any) -> None:
    left = engine.progress.left = LeftEpochs()
    endings.leave_note_of_left_epoch(engine)
    assert endings.cause_elsewhere(engine) is None
    left.newest = LeftEpoch(0, None, 3, 3, 18, 360, 2050, 40, 2)
    endings.leave_note_of_left_epoch(engine)
    reported = endings.cause_elsewhere(engine)
    assert isinstance(reported, WorldLost) and endings.status_of(reported) == "FAILED"
    assert "ended first (it left the loop over batches of epoch 0 within step 4, with steps to come: " in str(reported)


def test_workers_that_are_interrupted_together_are_all_interrupted(engine: Any) -> None:
    """Also the one that learned of the other's end before its own signal."""
    endings.leave_note(engine, "KILLED", KeyboardInterrupt(endings.SIGTERM))
    own = KeyboardInterrupt(endings.SIGTERM)
    assert endings.explained(engine, own) is own
    lost = endings.cause_elsewhere(engine)
    assert isinstance(lost, WorldLost)
    assert isinstance(endings.explained(engine, lost), KeyboardInterrupt)


def test_who_failed_counts_more_than_who_was_interrupted(engine: Any, dead: int) -> None:
    endings.leave_note(engine, "KILLED", KeyboardInterrupt())
    engine.host.neighbours[2] = dead
    assert "rank 2" in str(endings.cause_elsewhere(engine))


def test_memory_that_was_taken_away_explains_any_error(engine: Any) -> None:
    engine.model.tables.memory.trouble = lambda: "it was removed"
    reported = endings.explained(engine, FileNotFoundError("shards"))
    assert isinstance(reported, ShardMemoryError) and str(reported) == "it was removed"
    assert endings.explained(engine, reported) is reported


def test_where_a_launcher_replaces_workers_those_that_go_on_say_what_one_failed_with(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    engine.world.host = "h1"
    endings.leave_note(engine, "FAILED", ValueError("bad row"))
    before, pid = {1: os.getpid(), 2: 1}, os.getpid()
    assert endings.failed_neighbours(engine, before) == [], "it is in the new world"
    engine.host.neighbours = {}
    (reported,) = endings.failed_neighbours(engine, before)
    assert (reported.kind, reported.step, reported.level) == ("worker_failed", 7, "warning")
    assert reported.data == {"rank": 1, "host": "h1", "pid": pid, "why": "ValueError: bad row"}
    assert f"rank 1 of the world before, on h1 (process {pid}), ended with ValueError: bad row" in reported.message
    engine.host.neighbours = {1: pid}
    endings.leave_note(engine, "KILLED", KeyboardInterrupt("SIGTERM"))
    engine.host.neighbours = {}
    assert endings.failed_neighbours(engine, before) == [], "it was preempted"


@pytest.mark.parametrize(("code", "status"), [(None, None), (0, None), (3, "FAILED"), ("no", "FAILED")])
def test_a_script_that_leaves_by_sys_exit(code: Any, status: str | None) -> None:
    watch, own = endings.ExitWatch(), sys.exit
    watch.enter()
    with pytest.raises(SystemExit):
        sys.exit(code)
    watch.leave()
    assert sys.exit is own
    error = watch.error()
    assert (None if error is None else endings.status_of(error)) == status


def test_a_planned_switch_that_comes_late_is_reported_once_and_by_whoever_asks_first() -> None:
    callback = GBACallback(mode="allreduce", switch_at={10: "gba", 60: "allreduce"})
    assert callback.mode_request(12, "allreduce") and callback.late is None
    assert callback.overdue(61) == [60]
    assert callback.mode_request(75, "gba") and callback.late == (60, 75)
    assert callback.overdue(80) == []
    successor = GBACallback(mode="allreduce", switch_at={10: "gba"})
    assert successor.mode_request(75, "gba") is None and successor.late is None
