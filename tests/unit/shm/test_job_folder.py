"""The job's folder: who may own it, which host has it, what its name may be, and what happens where nothing fits in."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from gba_hvd_tools import cli
from gba_hvd_tools.doctor.checks import check_machine

import gba_hvd
import recovery
from gba_hvd.embedding.row_optimizers import build
from gba_hvd.errors import BadInput, GbaError, ShardMemoryError
from gba_hvd.ps import launch
from gba_hvd.ps.transport import new_key
from gba_hvd.shm import reaper
from gba_hvd.shm import shard_memory as memories
from gba_hvd.shm.host_identity import Host, is_of_a_container
from gba_hvd.shm.job_folder import job_folder
from gba_hvd.shm.shard_memory import ShardMemory, remove_orphaned_memory
from recovery.checkpointer import Checkpointer
from recovery.testing import two_tables
from tests.unit.conftest import Training
from tests.unit.shm.test_shard_memory import a_layout, until

NOBODY = 65534
ROOT = Path(__file__).parents[3]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder like /dev/shm: everybody may write there, nobody may touch what is another's."""
    base = Path(tempfile.mkdtemp(prefix="of-all-"))
    base.chmod(0o1777)
    yield base
    shutil.rmtree(base)


def as_nobody(code: str, *arguments: object) -> None:
    """Run Python code as another user."""
    drop = f"import os, sys; from pathlib import Path; os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
    subprocess.run([sys.executable, "-I", "-S", "-c", drop + code, *map(str, arguments)], check=True, timeout=60)


def poisoned(marker: Path) -> dict[str, object]:
    """The class of a row optimizer that makes a file when it is called."""
    return {"class": "subprocess:Popen", "fields": {"args": ["touch", str(marker)]}}


def open_(base: Path, job: str = "job", grace_s: float = 0.0) -> ShardMemory:
    return ShardMemory.create_or_open(base, job, a_layout(), grace_s)


# --- another user ----------------------------------------------------------------------------------------------------


def begin_with_a_server(base: Path, marker: Path) -> None:
    """As a worker with a GBACallback does."""
    memory = open_(base)
    try:
        launch.write_settings(memory.folder, "job", new_key(), a_layout(), gba_hvd.SGD(lr=0.1))
        launch.ensure_running(memory.folder, 0)
        until(lambda: marker.exists() or launch.why_not_started(memory.folder, 0))
        assert not marker.exists(), "code of another user was run"
    finally:
        memory.close()


@as_root
@pytest.mark.processes
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_a_folder_that_another_user_made_first_is_refused_and_runs_nothing(shared: Path, kind: str) -> None:
    folder, marker = job_folder(shared, "job"), shared / "was here"
    settings = {
        "job": "job", "layout": a_layout().describe(), "row_optimizer": poisoned(marker), "address": "127.0.0.1",
    }  # fmt: skip
    as_nobody(
        "where = Path(sys.argv[1]); made = where if sys.argv[3] == 'folder' else where.with_name('mine')\n"
        "made.mkdir(); made.chmod(0o777)\n"
        "if made != where: where.symlink_to(made)\n"
        "for name in ('ps.json', 'key'): (made / name).write_text(sys.argv[2]); (made / name).chmod(0o666)",
        folder, json.dumps(settings), kind,
    )  # fmt: skip
    with pytest.raises(ShardMemoryError, match="is a symbolic link" if kind == "link" else "belongs to user nobody"):
        begin_with_a_server(shared, marker)
    assert not marker.exists()
    with pytest.raises(ShardMemoryError):
        launch.ensure_running(folder, 0)
    with pytest.raises(ShardMemoryError):
        remove_orphaned_memory(shared, "job")
    assert not list(folder.glob("door")) and not list(folder.glob("*.log"))


@as_root
@pytest.mark.processes
def test_the_commands_do_not_look_into_a_folder_of_another_user(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = job_folder(shared, "job")
    as_nobody(
        "where = Path(sys.argv[1]); where.mkdir(); where.chmod(0o777)\n"
        "for name in ('ps.json', 'key', 'alive'): (where / name).write_text('{}'); (where / name).chmod(0o666)",
        folder,
    )  # fmt: skip
    with open(folder / "alive") as alive:
        fcntl.flock(alive, fcntl.LOCK_SH)  # somebody lives there
        assert cli.main(["status", "--dir", str(shared), "--timeout", "1"]) == 1
    assert "no job runs here" in capsys.readouterr().err
    assert not list(folder.glob("ps-0*"))


def test_a_folder_that_is_open_to_others_is_refused(tmp_path: Path) -> None:
    folder = job_folder(tmp_path, "job")
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(ShardMemoryError, match=r"is open to other users \(mode 750\).*rm -r"):
        open_(tmp_path)


def test_a_base_in_which_others_can_replace_folders_is_refused_with_what_to_do(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(ShardMemoryError, match=r"everybody can replace folders in .*chmod \+t .*GBA_HVD_SHARD_DIR"):
        open_(base)
    base.chmod(0o1777)  # as /dev/shm
    open_(base).close()


@as_root
def test_a_base_that_a_group_may_write_is_refused_unless_the_group_is_the_users_own(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(0o775)
    open_(base).close()  # umask 002 with a group of one's own is what many systems have
    os.chown(base, 0, NOBODY)
    base.chmod(0o775)
    with pytest.raises(ShardMemoryError, match=r"the members of group \w+ can replace folders in .*chmod go-w"):
        open_(base)


# --- what a server imports -------------------------------------------------------------------------------------------


@pytest.mark.processes
def test_a_server_runs_no_class_that_is_no_row_optimizer(tmp_path: Path) -> None:
    memory, marker = open_(tmp_path, grace_s=30.0), tmp_path / "was here"
    launch.write_settings(memory.folder, "job", new_key(), a_layout(), gba_hvd.SGD(lr=0.1))
    settings = json.loads((memory.folder / "ps.json").read_text())
    (memory.folder / "ps.json").write_text(json.dumps({**settings, "row_optimizer": poisoned(marker)}))
    launch.ensure_running(memory.folder, 0)
    try:
        assert until(lambda: marker.exists() or launch.why_not_started(memory.folder, 0), limit_s=120)
        assert not marker.exists()
        assert "subprocess:Popen belongs to Python" in launch.why_not_started(memory.folder, 0)
    finally:
        memory.close()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("subprocess:Popen", {"args": ["true"]}, "belongs to Python"),
        ("numpy:save", {}, "is no row optimizer: expected a dataclass"),
        ("gba_hvd.embedding.row_optimizers:Mapping", {}, "is no row optimizer"),
        ("gba_hvd.config:Config", {}, "is no row optimizer"),
        ("gba_hvd:Batch", {"lr": 0.1}, "is no row optimizer"),
        ("nowhere.to_be_found:SGD", {}, "cannot be imported here"),
        ("gba_hvd.embedding.row_optimizers:SGD", {"lr": 0.1, "args": ["true"]}, r"takes \['lr', 'weight_decay'\]"),
    ],
)
def test_only_row_optimizers_are_built(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        build({"class": name, "fields": fields})


@pytest.mark.parametrize("optimizer", [gba_hvd.SGD(0.1), gba_hvd.RowAdagrad(0.2), gba_hvd.Adam(0.1, betas=(0.5, 0.6))])
def test_what_is_built_is_what_was_described(optimizer: gba_hvd.SGD) -> None:
    assert build(json.loads(json.dumps(launch.describe_optimizer(optimizer)))) == optimizer


# --- names -----------------------------------------------------------------------------------------------------------


def test_a_name_that_leads_elsewhere_names_no_folder(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    for name in ("x/../../victim", "../victim", "a b", ""):
        with pytest.raises(BadInput, match="job_id must be 1 to 64 letters"):
            job_folder(tmp_path / "base", name)
    for path in (tmp_path / "victim", tmp_path / "gba-hvd-x/../victim"):
        with pytest.raises(ValueError, match="is no folder of a job"):
            reaper.remove(path)
    assert (tmp_path / "victim").is_dir()


def test_a_job_name_forged_in_a_checkpoint_removes_nothing(tmp_path: Path) -> None:
    """The folder the name leads to looks like the memory of a job that has died."""
    base, url, victim = tmp_path / "shm", str(tmp_path / "checkpoints"), tmp_path / "victim"
    with Checkpointer(url, two_tables(1, 100)) as checkpoints:
        checkpoints.save(3, 300, {}, about={"job": "x/../../victim"}).result(60)
    (base / "gba-hvd-x").mkdir(parents=True, mode=0o700)
    victim.mkdir(mode=0o700)
    (victim / "alive").touch()
    (victim / "of the user").touch()
    training = Training(base)
    training.state.register_callbacks([recovery.CheckpointCallback(url)])
    with pytest.raises(GbaError, match=r"names a job that there cannot be: .*got 'x/\.\./\.\./victim'"):
        training.state.sync()
    assert (victim / "of the user").exists()


# --- two hosts on one folder -----------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """From here on this process is on another host."""
    real = Host.here

    def be(**changes: object) -> None:
        monkeypatch.setattr(Host, "here", classmethod(lambda cls, base: replace(real(base), **changes)))

    return be


@pytest.mark.slow
def test_a_folder_that_another_host_lives_in_is_refused(tmp_path: Path, elsewhere: Callable[..., None]) -> None:
    memory = open_(tmp_path)
    elsewhere(processes=17)
    with pytest.raises(ShardMemoryError, match=r"held by living workers of another host.*cannot see the processes"):
        open_(tmp_path)
    elsewhere(folder="/shm")
    with pytest.raises(ShardMemoryError, match=r"sees the folder as /shm, this one as .*docker run --pid"):
        open_(tmp_path)
    memory.close()
    assert not memory.folder.exists()


@pytest.mark.slow
def test_a_container_that_is_started_again_goes_on_with_the_rows(
    tmp_path: Path, elsewhere: Callable[..., None]
) -> None:
    memory = open_(tmp_path)
    memory.init_shard(0, step=3)
    memory.close(remove=False)  # as if it had been killed
    elsewhere(processes=17)
    again = open_(tmp_path)
    assert again.marks().finished[0] == 3
    elsewhere()
    with pytest.raises(ShardMemoryError, match="held by living workers of another host"):
        open_(tmp_path)
    again.close()


def test_memory_of_an_earlier_boot_is_removed_and_of_another_machine_left_alone(
    tmp_path: Path, elsewhere: Callable[..., None]
) -> None:
    memory = open_(tmp_path)
    memory.init_shard(0, step=3)
    memory.close(remove=False)
    elsewhere(boot="another", name="elsewhere")
    with pytest.raises(ShardMemoryError, match=r"made on another machine.*GBA_HVD_SHARD_DIR=.*hostname"):
        open_(tmp_path)
    remove_orphaned_memory(tmp_path, "job")
    assert memory.folder.exists()
    elsewhere(boot="another")
    again = open_(tmp_path)
    assert again.marks().ready.tolist() == [0, 0, 0, 0]
    again.close()


def test_what_differs_makes_another_host(tmp_path: Path) -> None:
    here = Host.here(tmp_path)
    assert here.number == Host.here(tmp_path).number == replace(here, name="another name").number
    others = [replace(here, boot="b"), replace(here, processes=1), replace(here, folder="/f"), replace(here, device=9)]
    assert len({here.number, *(other.number for other in others)}) == 5
    assert Host(**json.loads(json.dumps(asdict(here)))) == here


@pytest.mark.parametrize(
    ("first", "parent", "expected"),
    [("gba-hvd", 1, True), ("tini", 1, True), ("systemd", 1, False), ("init", 1, False), ("sleep", 0, False)],
)
def test_a_process_of_a_container_is_told_from_one_of_a_machine(
    tmp_path: Path, first: str, parent: int, expected: bool
) -> None:
    for pid, of in ((30, 20), (20, parent)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {of} 1 1")
    (tmp_path / "1").mkdir()
    (tmp_path / "1/comm").write_text(f"{first}\n")
    assert is_of_a_container(30, tmp_path) == expected
    assert not is_of_a_container(40, tmp_path)


# --- no room, another machine ----------------------------------------------------------------------------------------

IN_A_FULL_FILE_SYSTEM = """
import os, sys
from pathlib import Path
import numpy as np
from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.selection.update_tracker import NoRoom, Tracker
from tests.unit.shm.test_shard_memory import a_layout
from recovery.testing import two_tables

base = Path("/mnt")

def fill():
    with open(base / "fill", "wb", buffering=0) as file:
        try:
            while True: file.write(bytes(4096))
        except OSError: pass

def marks():
    try:
        ShardMemory.create_or_open(base, "job", a_layout(n_shards=60), 0.0).marks()
    except ShardMemoryError as error:
        print(error)

def dropped():
    memory.drop(1)
    print(memory.marks().ready)

def tracker():
    try:
        Tracker(two_tables(), base / "tracker")
    except NoRoom as error:
        print(error)

def begun():
    begun_before.restored("m", None)
    print(begun_before.is_valid_for("m"))
    try:
        begun_before.begin(True)
    except NoRoom as error:
        print(error)

memory = ShardMemory.create_or_open(base, "before", a_layout(), 0.0)
begun_before = Tracker(two_tables(), base / "tracker-before")
fill()
for attempt in (marks, dropped, tracker, begun):  # each in a process of its own, which a signal may end
    if (pid := os.fork()) == 0:
        attempt()
        sys.stdout.flush()
        os._exit(0)
    print(attempt.__name__, os.waitpid(pid, 0)[1], flush=True)
memory.close()
"""


@as_root
@pytest.mark.processes
def test_a_full_file_system_is_a_sentence_and_no_signal() -> None:
    """Looking at the marks of a memory that has none yet takes a page each; so does the head of the tracker's file."""
    mount = 'mount -t tmpfs -o size=256k tmpfs /mnt && exec "$@"'  # gone with the namespace
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", IN_A_FULL_FILE_SYSTEM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    said = done.stdout.splitlines()
    ends = [line.split()[1] for line in said if line.split()[0] in ("marks", "dropped", "tracker", "begun")]
    assert ends == ["0"] * 4, f"the statuses of the attempts are {ends}: {done.stderr}"
    assert said[0].startswith("the marks of 60 shards need 240 KiB in /mnt, No space left"), done.stderr
    assert "mount -o remount" in said[0]
    assert said[2] == "[0 0 0 0]"
    assert said[4].startswith("what was saved of the rows (4 bytes each) has no room in /mnt: 4,096 bytes")
    assert said[6] == "False" and said[7].startswith("what was saved of the rows")


IN_HUGE_PAGES = """
import re
from pathlib import Path
from gba_hvd.shm.layout import Layout, SlotSpec
from gba_hvd.shm.shard_memory import ShardMemory

layout = Layout.of({"user": (200_000, 16)}, (SlotSpec("sum", per_row=True),), 2, 0, init_std=0.01)
memory = ShardMemory.create_or_open(Path("/mnt"), "job", layout, 0.0)
memory.reserve([0, 1])  # as a job does: its pages are those that the file system takes now
memory.init_shards([0, 1], 0)
_, _, ours = Path("/proc/self/smaps").read_text().partition(str(memory.folder / "shards"))
print(re.search(r"ShmemPmdMapped: *([0-9]+) kB", ours)[1])
memory.close()
"""


@pytest.mark.slow
@as_root
@pytest.mark.parametrize("option", ["within_size", "always", "never"])
def test_rows_are_in_huge_pages_whatever_the_file_system_is_told_to_do(option: str) -> None:
    mount = f'mount -t tmpfs -o huge={option} tmpfs /mnt || exit 77; exec "$@"'  # gone with the namespace
    command = ["unshare", "--mount", "sh", "-c", mount, "sh", sys.executable, "-c", IN_HUGE_PAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT)
    if done.returncode == 77:
        pytest.skip(f"this kernel's tmpfs has no huge pages: {done.stderr}")
    told = option != "never" or tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)
    assert (int(done.stdout) > 0) == told, done.stderr  # how many it gets is the kernel's matter


def test_another_machine_is_refused_when_memory_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memories.platform, "machine", lambda: "aarch64")
    gba_hvd.EmbeddingTables({"user": (3, 2)}, gba_hvd.SGD(0.1), shard_dir=tmp_path)  # to look at a model is no harm
    with pytest.raises(ShardMemoryError, match="this machine is aarch64; shard memory needs x86-64"):
        open_(tmp_path)
    assert not list(tmp_path.iterdir())
    assert check_machine("aarch64").status == "FAIL" and "x86-64" in check_machine("aarch64").advice
    assert check_machine("x86_64").status == "ok"


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo])
def test_a_file_in_the_place_of_the_folder_is_named_with_its_owner(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path / "gba-hvd-job")
    with pytest.raises(
        ShardMemoryError, match=r"gba-hvd-job is not a folder but a file of user .*: have it removed, or"
    ):
        open_(tmp_path)
