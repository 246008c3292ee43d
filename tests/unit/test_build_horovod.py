"""The Horovod build: what is changed in the source, under which key the wheel is kept, what a failure says."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from gba_hvd_tools import build_horovod
from gba_hvd_tools.build_horovod import (
    BuildError,
    Target,
    apply_patches,
    build,
    cached_wheel,
    check_sha256,
    cxx_standard,
    missing_tools,
    patches_of,
    table,
)
from gba_hvd_tools.build_progress import last_step, progress_line, run_shown

ROOT = Path(__file__).parents[2]
PATCHES = (*patches_of("native"), *patches_of("python"))
TARGET = Target(sys.executable, "cp311-linux_x86_64", "2.13.0+cpu", 20)


def write_source(folder: Path) -> Path:
    """A tree that has what the native patches look for, at its place, and nothing else."""
    texts: dict[str, list[str]] = {}
    for patch in patches_of("native"):
        for part in re.split(r"^--- a/", patch.read_text(), flags=re.MULTILINE)[1:]:
            lines = texts.setdefault(part.split("\n", 1)[0], [])
            for start, hunk in re.findall(r"^@@ -(\d+).*\n((?:[-+ ].*\n)+)", part, re.MULTILINE):
                before = [line[1:] for line in hunk.splitlines() if line[0] in " -"]
                lines.extend([""] * (int(start) - 1 + len(before) - len(lines)))
                lines[int(start) - 1 : int(start) - 1 + len(before)] = before
    for path, lines in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "source")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Horovod's Python files as published: the installed ones with all patches taken back."""
    import horovod

    folder = tmp_path / "horovod-0.28.1"
    shutil.copytree(
        Path(horovod.__file__).parent, folder / "horovod", ignore=shutil.ignore_patterns("__pycache__", "*.so")
    )
    environ = os.environ | {"GIT_CEILING_DIRECTORIES": str(tmp_path)}
    for patch in reversed(patches_of("python")):
        command = ["git", "apply", "--reverse", "--whitespace=nowarn", str(patch)]
        subprocess.run(command, cwd=folder, check=True, env=environ)
    return folder


def write_wheel(path: Path, library_at: str = "horovod/torch/") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("horovod/__init__.py", "")
        wheel.writestr(f"{library_at}mpi_lib_v2.so", "")
    return path


@pytest.mark.parametrize(("said", "standard"), [("201703", 17), ("202002", 20), ("202302", 23)])
def test_the_standard_is_the_one_torch_was_built_with(said: str, standard: int) -> None:
    assert cxx_standard(f"PyTorch built with:\n  - GCC 13.3\n  - C++ Version: {said}\n") == standard


def test_a_torch_that_does_not_report_its_standard_is_refused() -> None:
    with pytest.raises(BuildError, match="C\\+\\+ Version"):
        cxx_standard("PyTorch built with:\n  - GCC 13.3\n")


def test_the_installed_torch_reports_its_standard() -> None:
    import torch

    assert cxx_standard(torch.__config__.show()) >= 17


def test_patches_change_what_they_name_and_nothing_else(source: Path) -> None:
    before = {path.relative_to(source): path.read_text() for path in source.rglob("*") if path.is_file()}
    apply_patches(source, 20, patches_of("native"))
    after = {path.relative_to(source): path.read_text() for path in source.rglob("*") if path.is_file()}
    assert after.keys() == before.keys()
    for path in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        standard = before[Path(path)].replace("set(CMAKE_CXX_STANDARD 14)", "set(CMAKE_CXX_STANDARD 20)")
        assert after[Path(path)] == standard != before[Path(path)]
    gloo = after[Path("horovod/common/gloo/gloo_context.cc")]
    assert gloo.count("gloo_iface_ = global_context.gloo_iface_;") == 1


def test_a_folder_within_a_repository_is_changed_too(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "--quiet", str(source.parent)], check=True)
    monkeypatch.setenv("GIT_DIR", str(source.parent / ".git"))  # as in a hook
    apply_patches(source, 20, patches_of("native"))
    assert "set(CMAKE_CXX_STANDARD 20)" in (source / "CMakeLists.txt").read_text()


def test_a_patch_that_does_not_apply_stops_the_build(source: Path) -> None:
    (source / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 11)\n")
    with pytest.raises(BuildError, match=r"01-cxx-standard.patch does not apply in [^;]*; .*\n.*CMakeLists.txt"):
        apply_patches(source, 20, patches_of("native"))


def test_a_missing_file_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"CMakeLists.txt: No such file"):
        apply_patches(tmp_path, 20, patches_of("native"))


def test_an_incomplete_checkout_builds_no_horovod_without_patches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "native").mkdir()
    monkeypatch.setattr(build_horovod, "PATCHES", tmp_path)
    for kind in ("native", "python"):
        with pytest.raises(BuildError, match="not built without them"):
            patches_of(kind)


def test_a_machine_without_git_gives_the_apt_command(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match="apt-get install -y git"):
        apply_patches(source, 20, patches_of("native"))


def test_a_download_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "horovod-0.28.1.tar.gz"
    path.write_bytes(b"not Horovod")
    with pytest.raises(BuildError, match="expected sha256 92a43f5a"):
        check_sha256(path)


def test_the_key_changes_with_torch_python_standard_and_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        dataclasses.replace(TARGET, torch="2.14.0"),
        dataclasses.replace(TARGET, python_tag="cp312-linux_x86_64"),
        dataclasses.replace(TARGET, cxx_standard=17),
    ]
    keys = {TARGET.key, *(other.key for other in others)}
    native = TARGET.native_key
    shutil.copytree(build_horovod.PATCHES, tmp_path / "patches")
    monkeypatch.setattr(build_horovod, "PATCHES", tmp_path / "patches")
    patches_of("python")[-1].unlink()
    keys.add(TARGET.key)
    assert TARGET.native_key == native, "a change of Python files alone builds nothing"
    patches_of("native")[-1].unlink()
    keys.add(TARGET.key)
    assert len(keys) == 6 and TARGET.native_key != native
    assert all(key.startswith("horovod-0.28.1-torch-2.1") for key in keys)


def test_what_the_environment_says_of_compilers_is_in_the_key_and_nothing_else_gets_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS"):
        monkeypatch.delenv(name, raising=False)
    key = TARGET.key
    for name in ("HOROVOD_GPU_OPERATIONS", "CMAKE_PREFIX_PATH", "CPATH", "MAKEFLAGS", "NVCC_APPEND_FLAGS"):
        monkeypatch.setenv(name, "x")
        assert TARGET.key == key and name not in build_horovod.build_environment()
    for name in ("CXX", "CXXFLAGS"):
        monkeypatch.setenv(name, "x")
        assert TARGET.key != key and build_horovod.build_environment()[name] == "x"
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/home/joe")
    assert build_horovod.build_environment()["HOME"] == "/home/joe" and TARGET.key == key


def test_a_cached_wheel_is_used_without_building(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = write_wheel(tmp_path / TARGET.key / "horovod-0.28.1-cp311.whl")
    monkeypatch.setenv("PATH", "")
    assert build(TARGET, tmp_path) == wheel


def test_half_a_wheel_is_no_wheel(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "horovod-0.28.1-cp311.whl")
    wheel.write_bytes(wheel.read_bytes()[:40])
    assert cached_wheel(tmp_path) is None


def test_a_wheel_whose_library_is_in_a_wrong_place_is_no_wheel(tmp_path: Path) -> None:
    write_wheel(tmp_path / "horovod-0.28.1-cp311.whl", library_at="root/build+1/horovod/torch/")
    assert cached_wheel(tmp_path) is None


def test_a_missing_compiler_gives_the_apt_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert any("apt-get install -y g++" in line for line in missing_tools(tmp_path))
    assert any("cmake" in line for line in missing_tools(tmp_path))
    alone = dataclasses.replace(TARGET, python=str(tmp_path / "python"))
    with pytest.raises(BuildError, match="apt-get install -y g\\+\\+"):
        build(alone, tmp_path / "cache")


def test_an_interpreter_without_torch_is_asked_to_set_up(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named torch >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(BuildError, match="make setup"):
        build_horovod.find_target(str(python))


def test_the_last_step_of_make_is_what_is_shown() -> None:
    assert last_step("[  1%] Building a.o\nwarning: noise\n[ 42%] Building b.o\ncc -c b.c\n") == (42, "Building b.o")
    assert last_step("warning: [100%] is not a step here\n") is None
    assert progress_line(83.0, 42, "Building b.o", 24) == "  1:23  42% Building b.o"
    assert len(progress_line(5.0, None, "x" * 500, 79)) == 79


def run_script(script: str, log: Path) -> int:
    return run_shown(["/bin/sh", "-c", script], cwd=log.parent, env={}, log=log, screen=io.StringIO())


def test_the_whole_output_is_in_the_log_and_the_status_is_the_commands(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert run_script("echo one; echo two >&2; exit 3", log) == 3
    assert log.read_text().split() == ["one", "two"]


def test_a_failed_build_shows_the_end_of_its_log_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A python that cannot build stands in for the real one; the download is left out."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nseq 1 100\necho fatal error: no such header\nexit 2\n")
    python.chmod(0o755)
    cache = tmp_path / "cache"

    def unpack_nothing(target_python: str, folder: Path) -> Path:
        return make_sdist(folder)

    monkeypatch.setattr(build_horovod, "fetch_sdist", unpack_nothing)
    monkeypatch.setattr(build_horovod, "missing_tools", lambda python_bin: [])
    monkeypatch.setattr(build_horovod, "find_cmake", lambda python_bin: "cmake")
    target = dataclasses.replace(TARGET, python=str(python))
    with pytest.raises(BuildError) as failure:
        build(target, cache)
    message = str(failure.value)
    assert "fatal error: no such header" in message
    assert "\n62\n" in message
    assert "\n61\n" not in message
    assert str(cache / f"{target.native_key}.log") in message
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".lock", ".log"]


@pytest.mark.slow
def test_python_files_are_changed_in_the_built_wheel(tmp_path: Path, published: Path) -> None:
    """With a real interpreter's `wheel`, which checks what it unpacks; the result is what is installed here."""
    import horovod

    info = published / "horovod-0.28.1.dist-info"
    (published / "horovod/torch/mpi_lib_v2.so").touch()
    info.mkdir()
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("")
    folder = tmp_path / "cache" / TARGET.native_key
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(folder), str(published)]
    subprocess.run(command, check=True, capture_output=True)
    wheel = build(TARGET, tmp_path / "cache")
    assert wheel.parent.name == TARGET.key
    with zipfile.ZipFile(wheel) as archive:
        for path in set(
            re.findall(r"^\+\+\+ b/(\S+)$", "".join(p.read_text() for p in patches_of("python")), re.MULTILINE)
        ):
            installed = Path(horovod.__file__).parents[1] / path
            assert archive.read(path) == installed.read_bytes() != (published / path).read_bytes()
        record = archive.read("horovod-0.28.1.dist-info/RECORD").decode()
    assert "horovod/runner/elastic/discovery.py,sha256=" in record
    assert build(TARGET, tmp_path / "cache") == wheel


def make_sdist(folder: Path) -> Path:
    """A source distribution that has what the native patches look for."""
    sdist = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(write_source(folder / "source"), "horovod-0.28.1")
    return sdist


def test_every_patch_is_documented_with_a_test_that_exists() -> None:
    assert table() in (ROOT / "docs/HOROVOD.md").read_text()
    for patch in PATCHES:
        path, test = HeaderParser().parsestr(patch.read_text())["Test"].split("::")
        assert f"\ndef {test}(" in (ROOT / path).read_text(), test
