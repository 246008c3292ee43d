"""A `prepare` that does not finish leaves nothing that opens, nothing half, and nothing in the way of the next one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from gba_hvd.data import ClickLog, SplitFiles, prepare
from gba_hvd.data import prepare as prepare_function
from gba_hvd.data.splits import PrepareProgress
from gba_hvd.errors import BadInput

from .colours import COLOURS, GOOD, HEADER

KILLED_WHILE_WRITING = """
import os, signal, sys
from pathlib import Path
from gba_hvd.data import SplitFiles, prepare
from tests_colours import COLOURS

def kill(progress):
    if progress.phase == "writing" and progress.rows >= 100:
        os.kill(os.getpid(), signal.SIGKILL)

source = SplitFiles({"train": [Path(sys.argv[1])]})
prepare(COLOURS, source, sys.argv[2], on_progress=kill, block_bytes=200, rows_per_part=10)
"""


class Interrupted(Exception):
    pass


@pytest.fixture
def source(tmp_path: Path) -> SplitFiles:
    path = tmp_path / "train.csv"
    path.write_text(HEADER + GOOD * 100)
    return SplitFiles({"train": [path]})


@pytest.mark.parametrize("phase", ["fitting", "writing"])
@pytest.mark.parametrize("after_rows", [0, 100, 200])
def test_an_error_on_the_way_leaves_nothing(phase: str, after_rows: int, source: SplitFiles, tmp_path: Path) -> None:
    def interrupt(progress: PrepareProgress) -> None:
        if progress.phase == phase and progress.rows >= after_rows:
            raise Interrupted

    with pytest.raises(Interrupted):
        prepare(COLOURS, source, tmp_path / "out", on_progress=interrupt, block_bytes=200, rows_per_part=10)
    assert [path.name for path in tmp_path.iterdir()] == ["train.csv"]


def test_a_failed_overwrite_keeps_the_old_dataset(source: SplitFiles, tmp_path: Path) -> None:
    prepare(COLOURS, source, tmp_path / "out")
    before = (tmp_path / "out/dataset.json").read_bytes()
    (tmp_path / "train.csv").write_text(HEADER + "7,1,red,round\n")
    with pytest.raises(BadInput, match="malformed"):
        prepare(COLOURS, source, tmp_path / "out", overwrite=True)
    assert (tmp_path / "out/dataset.json").read_bytes() == before
    assert len(ClickLog.open(tmp_path / "out")) == 200


@pytest.mark.slow
def test_an_overwrite_replaces_all(source: SplitFiles, tmp_path: Path) -> None:
    prepare(COLOURS, source, tmp_path / "out", rows_per_part=10, block_bytes=100)
    (tmp_path / "train.csv").write_text(HEADER + GOOD)
    prepare(COLOURS, source, tmp_path / "out", overwrite=True)
    assert len(ClickLog.open(tmp_path / "out")) == 2
    assert len(list((tmp_path / "out/train").iterdir())) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.csv"]


def test_without_overwrite_what_is_there_is_left_alone(source: SplitFiles, tmp_path: Path) -> None:
    prepare(COLOURS, source, tmp_path / "out")
    with pytest.raises(BadInput, match="there is a dataset already; choose another --out, or --overwrite it"):
        prepare(COLOURS, source, tmp_path / "out")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/letter.txt").write_text("dear")
    with pytest.raises(BadInput, match="exists and is no prepared dataset, so it is left alone"):
        prepare(COLOURS, source, tmp_path / "precious", overwrite=True)
    assert (tmp_path / "precious/letter.txt").read_text() == "dear"


def test_an_overwrite_leaves_a_folder_alone_that_has_other_files(source: SplitFiles, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(COLOURS, source, out)
    before = (out / "dataset.json").read_bytes()

    def write_letters(progress: PrepareProgress) -> None:
        (out / "letter.txt").write_text("dear")
        (out / "train/part-00000.arrow.old").write_text("a copy")

    with pytest.raises(BadInput, match=r"so it is left alone: letter\.txt, train/part-00000\.arrow\.old; move"):
        prepare(COLOURS, source, out, overwrite=True, on_progress=write_letters)
    with pytest.raises(BadInput, match=r"so it is left alone: letter\.txt, train/part-00000\.arrow\.old; move"):
        prepare(COLOURS, source, out, overwrite=True)
    assert (out / "letter.txt").read_text() == "dear" and (out / "dataset.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.new", "train.csv"]
    (out / "letter.txt").unlink()
    (out / "train/part-00000.arrow.old").unlink()
    prepare(COLOURS, source, out, overwrite=True)


def test_a_finished_dataset_is_kept_beside_a_folder_that_cannot_be_replaced(
    source: SplitFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    prepare(COLOURS, source, out)
    old = out.stat().st_ino

    def write_letter(progress: PrepareProgress) -> None:
        (out / "letter.txt").write_text("dear")

    for name in ("out.new", "out.new-2"):
        with pytest.raises(BadInput, match=rf"letter\.txt; move .* The new dataset is complete, in .*/{name}: use it"):
            prepare(COLOURS, source, out, overwrite=True, on_progress=write_letter)
        (out / "letter.txt").unlink()
        assert len(ClickLog.open(tmp_path / name).take(np.arange(200))) == 200

    def busy(one: Path, other: Path) -> bool:
        raise OSError("a mount point")

    monkeypatch.setattr(import_module("gba_hvd.data.prepare"), "exchange", busy)
    with pytest.raises(BadInput, match=r"a mount point\. The new dataset is complete, in .*/out\.new-3: use it"):
        prepare(COLOURS, source, out, overwrite=True)
    assert out.stat().st_ino == old and len(ClickLog.open(out)) == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.new", "out.new-2", "out.new-3", "train.csv"]


def test_two_at_once_do_not_mix(source: SplitFiles, tmp_path: Path) -> None:
    refused = []

    def start_another(progress: PrepareProgress) -> None:
        with pytest.raises(BadInput, match="another prepare is writing it right now"):
            prepare_function(COLOURS, source, tmp_path / "out")
        refused.append(progress)

    prepare(COLOURS, source, tmp_path / "out", on_progress=start_another)
    assert refused
    assert len(ClickLog.open(tmp_path / "out")) == 200


@pytest.mark.processes
def test_a_killed_prepare_leaves_no_dataset_and_the_next_one_clears_up(source: SplitFiles, tmp_path: Path) -> None:
    (tmp_path / "tests_colours.py").write_text((Path(__file__).parent / "colours.py").read_text())
    command = [sys.executable, "-c", KILLED_WHILE_WRITING, str(tmp_path / "train.csv"), str(tmp_path / "made/out")]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], timeout=110, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in (tmp_path / "made").iterdir()] == [".out.preparing"]
    assert not list((tmp_path / "made").rglob("dataset.json"))
    with pytest.raises(BadInput, match="no prepared dataset"):
        ClickLog.open(tmp_path / "made/out")
    for unfinished in (tmp_path / "made/.out.preparing", tmp_path / "made/.out.preparing/dataset"):
        with pytest.raises(BadInput, match="no prepared dataset"):
            ClickLog.open(unfinished)
    prepare(COLOURS, source, tmp_path / "made/out")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]
    assert len(ClickLog.open(tmp_path / "made/out").take(np.arange(200))) == 200


KILLED_WHILE_REPLACING = """
import os, signal, sys
from pathlib import Path
from tests_colours import COLOURS
from importlib import import_module
from gba_hvd.data import SplitFiles
module = import_module("gba_hvd.data.prepare")
out, how = Path(sys.argv[2]), sys.argv[3]
def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if how == "exchanged":
    before = module._put_in_place
    module._put_in_place = lambda folder, out: (before(folder, out), kill())
else:
    module.exchange = lambda one, other: False
    rename = Path.rename
    Path.rename = lambda path, target: kill() if path.name == "dataset" else rename(path, target)
module.prepare(COLOURS, SplitFiles({"train": [Path(sys.argv[1])]}), out, overwrite=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(("how", "new_is_there"), [("exchanged", True), ("between two renames", False)])
def test_a_prepare_that_is_killed_while_it_replaces_a_dataset_leaves_the_old_or_the_new_one(
    source: SplitFiles, tmp_path: Path, how: str, new_is_there: bool
) -> None:
    out = tmp_path / "made/out"
    prepare(COLOURS, source, out)
    before = json.loads((out / "dataset.json").read_text())
    (tmp_path / "tests_colours.py").write_text((Path(__file__).parent / "colours.py").read_text())
    lines = (tmp_path / "train.csv").read_text().splitlines(keepends=True)
    (tmp_path / "more.csv").write_text("".join([*lines, *lines[1:]]))
    command = [sys.executable, "-c", KILLED_WHILE_REPLACING, str(tmp_path / "more.csv"), str(out), how]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    killed = subprocess.run(command, env=environment, cwd=Path(__file__).parents[2], timeout=110, check=False)
    assert killed.returncode == -signal.SIGKILL
    if new_is_there:
        assert len(ClickLog.open(out)) == 400
    else:
        with pytest.raises(BadInput, match="there is a dataset already"):  # it is brought back, not overwritten
            prepare(COLOURS, source, out)
        assert json.loads((out / "dataset.json").read_text()) == before
        assert len(ClickLog.open(out)) == 200
    prepare(COLOURS, source, out, overwrite=True)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]


def test_every_file_of_a_dataset_is_on_the_disk_before_the_manifest(
    source: SplitFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    before = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}").rpartition(".preparing/dataset")[2])
        before(file)

    monkeypatch.setattr(os, "fsync", fsync)
    prepare(COLOURS, source, tmp_path / "out", rows_per_part=64)
    at = synced.index("/dataset.json")
    files = {f"/{path.relative_to(tmp_path / 'out')}" for path in (tmp_path / "out").rglob("*")} - {"/dataset.json"}
    assert files and files <= set(synced[:at])
    assert len(synced) > at + 1, "and the folder, and the one it is in, after it"


def test_when_the_new_dataset_cannot_be_put_in_place_the_old_one_is_back(
    source: SplitFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(COLOURS, source, tmp_path / "out")
    before = (tmp_path / "out/dataset.json").read_bytes()
    rename, failed = Path.rename, []

    def fail_for_the_new(path: Path, target: Path) -> Path:
        if path.name == "dataset":
            failed.append(path)
            raise OSError("the disk does not answer")
        return rename(path, target)

    monkeypatch.setattr(import_module("gba_hvd.data.prepare"), "exchange", lambda *_: False)  # as on old file systems
    monkeypatch.setattr(Path, "rename", fail_for_the_new)
    with pytest.raises(BadInput, match="the disk does not answer"):
        prepare(COLOURS, source, tmp_path / "out", overwrite=True)
    assert failed
    assert (tmp_path / "out/dataset.json").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "train.csv"]
