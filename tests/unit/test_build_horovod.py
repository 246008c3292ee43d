"""The Horovod build: what is changed in the source, under which key the wheel is kept, what a failure says."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from gba_hvd_tools import build_horovod, horovod_mends
from gba_hvd_tools.build_horovod import (
    NATIVE,
    PYTHON,
    BuildError,
    Patch,
    Target,
    apply_patches,
    build,
    cached_wheel,
    check_sha256,
    cxx_standard,
    missing_tools,
)
from gba_hvd_tools.build_progress import last_step, progress_line, run_shown

PATCHES = NATIVE + PYTHON
TARGET = Target(sys.executable, "cp311-linux_x86_64", "2.13.0+cpu", 20)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tree that has every text to replace once."""
    for path in {patch.path for patch in PATCHES}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("before\n" + "".join(p.old for p in PATCHES if p.path == path) + "\nafter\n")
    return tmp_path


def write_wheel(path: Path, library_at: str = "horovod/torch/") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("horovod/__init__.py", "")
        wheel.writestr(f"{library_at}mpi_lib_v2.so", "")
    return path


@pytest.mark.parametrize(("said", "standard"), [("201703", 17), ("202002", 20), ("202302", 23)])
def test_the_standard_is_the_one_torch_was_built_with(said: str, standard: int) -> None:
    assert cxx_standard(f"PyTorch built with:\n  - GCC 13.3\n  - C++ Version: {said}\n") == standard


def test_a_torch_that_does_not_tell_its_standard_is_refused() -> None:
    with pytest.raises(BuildError, match="C\\+\\+ Version"):
        cxx_standard("PyTorch built with:\n  - GCC 13.3\n")


def test_the_installed_torch_tells_its_standard() -> None:
    import torch

    assert cxx_standard(torch.__config__.show()) >= 17


def test_patches_change_what_they_name_and_nothing_else(source: Path) -> None:
    apply_patches(source, 20, PATCHES)
    assert (source / "CMakeLists.txt").read_text() == "before\nset(CMAKE_CXX_STANDARD 20)\nafter\n"
    gloo = (source / "horovod/common/gloo/gloo_context.cc").read_text()
    assert gloo.count("gloo_iface_ = global_context.gloo_iface_;") == 1
    assert gloo.startswith("before\n")
    assert gloo.endswith("\nafter\n")


@pytest.mark.parametrize("times", [0, 2])
def test_a_text_that_is_not_there_exactly_once_stops_the_build(source: Path, times: int) -> None:
    (source / "CMakeLists.txt").write_text("set(CMAKE_CXX_STANDARD 14)\n" * times)
    with pytest.raises(BuildError, match=f"CMakeLists.txt: expected exactly one place .* found {times}"):
        apply_patches(source, 20, PATCHES)


def test_a_missing_file_stops_the_build(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"expected the file x\.cc"):
        apply_patches(tmp_path, 20, (Patch("x.cc", "a", "b", "because"),))


def test_a_download_with_another_checksum_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "horovod-0.28.1.tar.gz"
    path.write_bytes(b"not Horovod")
    with pytest.raises(BuildError, match="expected sha256 92a43f5a"):
        check_sha256(path)


def test_the_key_changes_with_torch_python_standard_and_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [
        dataclasses.replace(TARGET, torch="2.14.0"),
        dataclasses.replace(TARGET, python_tag="cp312-linux_x86_64"),
        dataclasses.replace(TARGET, cxx_standard=17),
    ]
    keys = {TARGET.key, *(other.key for other in others)}
    native = TARGET.native_key
    monkeypatch.setattr(build_horovod, "PYTHON", PYTHON[:-1])
    keys.add(TARGET.key)
    assert TARGET.native_key == native, "a change of Python files alone builds nothing"
    monkeypatch.setattr(build_horovod, "NATIVE", NATIVE[:-1])
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


def test_an_interpreter_without_torch_is_told_to_set_up(tmp_path: Path) -> None:
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


def test_python_files_are_changed_in_the_built_wheel(tmp_path: Path) -> None:
    """With a real interpreter's `wheel`, which checks what it unpacks."""
    unpacked = tmp_path / "horovod-0.28.1"
    info = unpacked / "horovod-0.28.1.dist-info"
    for path in {patch.path for patch in PYTHON} | {"horovod/torch/mpi_lib_v2.so"}:
        (unpacked / path).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / path).write_text("".join(patch.old for patch in PYTHON if patch.path == path))
    info.mkdir()
    (info / "WHEEL").write_text("Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: cp311-cp311-linux_x86_64\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "RECORD").write_text("")
    folder = tmp_path / "cache" / TARGET.native_key
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "wheel", "pack", "--dest-dir", str(folder), str(unpacked)]
    subprocess.run(command, check=True, capture_output=True)
    wheel = build(TARGET, tmp_path / "cache")
    assert wheel.parent.name == TARGET.key
    with zipfile.ZipFile(wheel) as archive:
        assert "close_slot" in archive.read("horovod/runner/elastic/discovery.py").decode()
        record = archive.read("horovod-0.28.1.dist-info/RECORD").decode()
    assert "horovod/runner/elastic/discovery.py,sha256=" in record
    assert build(TARGET, tmp_path / "cache") == wheel


def make_sdist(folder: Path) -> Path:
    """A source distribution that has what the patches look for."""
    import tarfile

    sdist = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        for path in {patch.path for patch in PATCHES}:
            text = "".join(patch.old for patch in PATCHES if patch.path == path).encode()
            entry = tarfile.TarInfo(f"horovod-0.28.1/{path}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    return sdist


def test_every_mend_is_documented_with_a_test_that_exists() -> None:
    root = Path(__file__).parents[2]
    assert horovod_mends.TESTS.keys() == {patch.why for patch in PATCHES}
    assert horovod_mends.table() in (root / "docs/HOROVOD.md").read_text()
    for name in horovod_mends.TESTS.values():
        path, test = name.split("::")
        assert f"\ndef {test}(" in (root / path).read_text(), name
