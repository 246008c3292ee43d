"""What dead jobs leave is found, shown and removed; what anybody alive holds is not touched."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.doctor.checks import check_orphaned_memory

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import reaper, sweep
from gba_hvd.shm.job_board import Board
from gba_hvd.shm.job_folder import foreign, job_folder
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.shm.sweep import OrphanedMemory, orphaned_memory
from tests.processes.cluster import CONTAINER, needs_containers
from tests.unit.shm.test_shard_memory import a_layout, keepers, until

pytestmark = [pytest.mark.processes]

LIVE = """
import fcntl, os, sys
alive = os.open(sys.argv[1], os.O_RDWR)
fcntl.flock(alive, fcntl.LOCK_SH)
print("open", flush=True)
input()
"""


@pytest.fixture(autouse=True)
def semaphores(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for semaphores that no job beside this test sweeps, of the file system they are made in."""
    with tempfile.TemporaryDirectory(prefix="semaphores-", dir=sweep.SEMAPHORES) as folder:
        monkeypatch.setattr(sweep, "SEMAPHORES", Path(folder))
        yield Path(folder)


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts jobs with one worker each: a process that holds the memory."""
    made: list[subprocess.Popen[str]] = []

    def start(job: str, grace_s: float = 600.0) -> subprocess.Popen[str]:
        memory = ShardMemory.create_or_open(tmp_path, job, a_layout(), grace_s)
        memory.init_shard(0, step=3)
        command = [sys.executable, "-I", "-S", "-c", LIVE, str(memory.folder / "alive")]
        made.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert made[-1].stdout is not None and made[-1].stdout.readline() == "open\n"
        memory.close(remove=False)
        return made[-1]

    yield start
    for worker in made:
        worker.kill()
        worker.communicate(timeout=30)
    for folder in tmp_path.glob("gba-hvd-*"):
        reaper.remove(folder)
    assert until(lambda: not any(keepers(folder) for folder in tmp_path.glob("gba-hvd-*")))


def kill_with_its_keeper(worker: subprocess.Popen[str], folder: Path) -> None:
    for pid in keepers(folder):
        os.kill(int(pid), signal.SIGKILL)
    worker.kill()
    worker.wait(30)
    # A process that is being killed has lost its command line before it lets go of its locks.
    assert until(lambda: any(left.path == folder and not left.watched for left in orphaned_memory(folder.parent)))


def test_the_keeper_stays_when_all_processes_get_sigterm(
    tmp_path: Path, live: Callable[..., subprocess.Popen[str]]
) -> None:
    """As systemd and batch systems do. The worker dies of it without a word."""
    worker, folder = live("job", grace_s=0.5), job_folder(tmp_path, "job")
    (pid,) = keepers(folder)
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(int(pid), number)
    worker.terminate()
    worker.wait(30)
    assert until(lambda: not folder.exists()), "the memory of the job is left"
    assert until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_job_that_starts_has_the_memory_of_dead_ones_removed_after_their_grace(
    tmp_path: Path, live: Callable[..., subprocess.Popen[str]]
) -> None:
    dead, other = job_folder(tmp_path, "dead"), job_folder(tmp_path, "other")
    live("other")
    kill_with_its_keeper(live("dead"), dead)
    (tmp_path / "gba-hvd-x.gone-7").mkdir(mode=0o700)
    (tmp_path / "gba-hvd-unborn").mkdir(mode=0o700)
    (tmp_path / "gba-hvd-unborn" / "door").touch()
    memory = ShardMemory.create_or_open(tmp_path, "new", a_layout(), grace_s=0.5)
    try:
        assert until(lambda: not dead.exists())
        assert not (tmp_path / "gba-hvd-x.gone-7").exists() and not (tmp_path / "gba-hvd-unborn").exists()
        assert len(keepers(other)) == 1 and len(keepers(memory.folder)) == 1, "what lives needs no second keeper"
    finally:
        memory.close()


def test_a_dead_job_can_be_started_again_although_another_one_has_started(
    tmp_path: Path, live: Callable[..., subprocess.Popen[str]]
) -> None:
    kill_with_its_keeper(live("dead"), job_folder(tmp_path, "dead"))
    other = ShardMemory.create_or_open(tmp_path, "new", a_layout(), grace_s=600.0)
    again = ShardMemory.create_or_open(tmp_path, "dead", a_layout(), grace_s=600.0)
    assert again.marks().finished[0] == 3
    other.close()
    again.close()


def test_clean_shows_first_and_removes_when_asked(
    tmp_path: Path, live: Callable[..., subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    dead, lives, watched = (job_folder(tmp_path, name) for name in ("dead", "lives", "watched"))
    live("lives")
    killed = live("watched")
    killed.kill()
    killed.wait(30)
    kill_with_its_keeper(live("dead"), dead)
    (tmp_path / "somebody's").mkdir()

    assert cli.main(["clean", "--dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{dead}  memory of a dead job; would be removed" in shown
    assert f"{watched}  memory of a dead job; left alone: its keeper removes it after the grace period" in shown
    assert str(lives) not in shown and "somebody's" not in shown and "clean --yes" in shown
    finding = check_orphaned_memory(tmp_path)
    assert finding.status == "warning" and "gba-hvd-dead" in finding.found and "watched" not in finding.found
    (removes,) = re.findall(r"clean --yes removes (.*)", shown)
    assert f"dead jobs left {removes}: " in finding.found and "; beside that 1 memory" in finding.found
    assert dead.exists()

    assert cli.main(["clean", "--dir", str(tmp_path), "--yes", "--json"]) == 0
    reported = {Path(one["path"]).name: one["removed"] for one in json.loads(capsys.readouterr().out)["left"]}
    assert reported["gba-hvd-dead"] and not reported["gba-hvd-watched"]
    assert not dead.exists() and watched.exists() and lives.exists()
    finding = check_orphaned_memory(tmp_path)
    assert finding.status == "ok" and finding.found.endswith("of dead jobs that their keepers will remove")


OWN = ("gba-hvd-main/src/model.py", "gba-hvd-spool/0001.json", "gba-hvd-kept/door/x", "gba-hvd-x.gone-7/notes.txt")


def test_folders_of_the_user_are_never_taken_for_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / name for name in OWN]
    more = job_folder(tmp_path, "dead") / "notes.txt"
    for file in (*files, more):
        file.parent.mkdir(parents=True)
        file.write_text("mine")
        for folder in file.relative_to(tmp_path).parents[:-1]:
            (tmp_path / folder).chmod(0o700)
    for name in ("door", "alive", "memory.json", "ps-0.lock", "key.new-1-2"):
        (more.parent / name).touch()
    (tmp_path / "gba-hvd-empty").mkdir(mode=0o700)
    assert orphaned_memory(tmp_path, tmp_path) == [] and sweep.sweep(tmp_path, 0.0) == []
    assert cli.main(["clean", "--dir", str(tmp_path), "--yes"]) == 0
    shown = capsys.readouterr().out
    assert f"{more.parent}  left alone: it has 'notes.txt', which no job makes" in shown
    assert f"{tmp_path / 'gba-hvd-main'}  left alone: it has no file `door`, which a job makes first" in shown
    assert all(file.read_text() == "mine" for file in (*files, more)) and (tmp_path / "gba-hvd-empty").exists()
    assert not sweep.remove(OrphanedMemory(more.parent, "job", 0)) and more.exists()
    more.unlink()
    faults = more.parent / "faults"
    faults.mkdir()
    (faults / "fault-000-kill.json").touch()
    os.mknod(more.parent / "ps-0.pull", 0o600 | stat.S_IFSOCK)
    (left,) = orphaned_memory(tmp_path, tmp_path)
    assert sweep.remove(left) and not more.parent.exists()


def test_a_job_does_not_begin_in_a_folder_of_the_user(tmp_path: Path) -> None:
    """It would remove it when it ends."""
    own = job_folder(tmp_path, "main") / "model.py"
    own.parent.mkdir(mode=0o700)
    own.touch()
    with pytest.raises(ShardMemoryError, match=r"is not the memory of a job: it has 'model.py', which no job makes"):
        ShardMemory.create_or_open(tmp_path, "main", a_layout(), grace_s=0.0)
    assert [path.name for path in own.parent.iterdir()] == ["model.py"]


LOOKS = """
import sys
from pathlib import Path
from gba_hvd_tools import cli
from gba_hvd_tools.doctor.checks import check_orphaned_memory
from gba_hvd.shm import sweep
folder = sys.argv[1]
sweep.SEMAPHORES = Path(folder)
for command in (["clean", "--yes"], ["clean", "--yes", "--json"], ["status"], ["status", "--json"]):
    assert cli.main([*command, "--dir", folder]) == 0
    print("-" * 8)
print(check_orphaned_memory(Path(folder)))
"""


@needs_containers()
def test_commands_in_another_container_show_whose_memory_it_is_and_leave_it_alone(
    tmp_path: Path, live: Callable[..., subprocess.Popen[str]]
) -> None:
    live("lives")
    folder, here = job_folder(tmp_path, "lives"), os.stat("/proc/self/ns/pid").st_ino
    facts = {"workers": 1, "hosts": 1, "switchable": False, "checkpoints": ""}
    Board(folder, "allreduce", 3, name="ctr", job="lives", **facts)
    command = [*CONTAINER, sys.executable, "-c", LOOKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    cleaned, as_json, status, status_json, finding = re.split(r"-{8}\n", done.stdout)
    container = f"another container (host name {os.uname().nodename}, pid namespace {here}, here "
    assert f"{folder}  left alone: a running job uses it, with processes of {container}" in cleaned
    (other,) = json.loads(as_json)["in_other_containers"]
    assert other["path"] == str(folder) and other["held_by"].startswith(f"processes of {container}")
    assert re.search(rf"processes +of {re.escape(container)}\d+\): their numbers mean nothing here", status)
    assert json.loads(status_json)["container"].startswith(container)
    assert "status='ok'" in finding and f"gba-hvd-lives is in use, by processes of {container}" in finding
    assert (folder / "shards").exists()


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["--json"], ["--yes"]):
        assert cli.main(["clean", "--dir", str(tmp_path / "shm"), *more]) == 1
        said = capsys.readouterr()
        assert f"there is no folder {tmp_path / 'shm'}: name the one that shards lie in" in said.err and not said.out


def test_what_is_swept_is_a_line_for_each_memory_and_one_for_all_semaphores(semaphores: Path) -> None:
    left = [OrphanedMemory(Path(f"/dev/shm/sem.mp-{n:08d}"), "semaphore", 4096) for n in range(20)]
    job = OrphanedMemory(Path("/dev/shm/gba-hvd-old"), "job", 31_000_000)
    assert sweep.in_words([job, *left]) == [
        "/dev/shm/gba-hvd-old was left by a dead job and is removed (31.0 MB)",
        f"20 semaphores of dead jobs were removed from {semaphores}",
    ]
    assert sweep.in_words(left[:1]) == [
        f"1 semaphore that a dead job's launcher had left was removed from {semaphores}"
    ]
    assert sweep.in_words([]) == []
    assert sweep.counted([job, *left]) == "1 memory (31.0 MB) and 20 semaphores"
    assert sweep.counted(left[:1]) == "1 semaphore" and sweep.counted([job, job]) == "2 memories (62.0 MB)"


def test_a_server_that_lives_may_be_saving(tmp_path: Path, live: Callable[..., subprocess.Popen[str]]) -> None:
    folder = job_folder(tmp_path, "dead")
    kill_with_its_keeper(live("dead"), folder)
    import fcntl

    with open(folder / "ps-0.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (left,) = orphaned_memory(tmp_path, tmp_path)
        assert left.served and left.held_by
    (left,) = orphaned_memory(tmp_path, tmp_path)
    assert not left.held_by and sweep.remove(left)


SEMAPHORE = """
import multiprocessing
semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
input()
"""


def test_semaphores_of_a_killed_launcher_are_removed_and_those_in_use_are_not(
    tmp_path: Path, semaphores: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As Horovod's launcher makes them. The process that cleans up behind it is killed, too."""
    event = multiprocessing.get_context("spawn").Event()
    mine = semaphores / f"sem.{event._flag._semlock.name[1:]}"  # type: ignore[attr-defined]
    mine.hardlink_to(semaphores.parent / mine.name)
    other = subprocess.Popen([sys.executable, "-c", SEMAPHORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout is not None
    made = semaphores / f"sem.{other.stdout.readline().decode().strip()[1:]}"
    (semaphores.parent / made.name).rename(made)

    def found() -> set[Path]:
        return {left.path for left in orphaned_memory(tmp_path)}

    assert not found() & {made, mine}, "their makers live"
    for pid in Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    other.kill()
    other.communicate(timeout=30)
    assert until(lambda: made in found()) and mine not in found()
    capsys.readouterr()
    assert cli.main(["clean", "--dir", str(tmp_path), "--yes"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.endswith("killed; removed"))
    assert line.split() == f"1 {semaphores}/sem.mp-* semaphores of launchers that were killed; removed".split()
    assert not made.exists() and mine.exists()
    assert not event.is_set()


@pytest.mark.parametrize(
    "name", ["ps-0.dense.residuals", "ps-0.dense.residuals.new", "ps-12.dense.new-17", "key.new-1-2", "owner.new"]
)
def test_files_that_a_kill_leaves_half_written_are_those_of_a_job(tmp_path: Path, name: str) -> None:
    for made in ("door", "alive", "memory.json", "ps-0.lock", "outbox-17-2", name):
        (tmp_path / made).touch()
    assert foreign(tmp_path) == ""
    (tmp_path / "thesis.txt").touch()
    assert foreign(tmp_path) == "it has 'thesis.txt', which no job makes"
