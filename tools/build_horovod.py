"""Build the Horovod wheel for the installed torch, once per user.

PyPI has Horovod as a source distribution only. Decided here: with which flags it is built, and under which key the
wheel is kept. What is changed in the source, and why, is in `horovod/patches`: the patches in `native` are applied
before the compiled part is built, once; those in `python` to the built wheel, so that a change of them costs seconds.
How the build is run and shown is in `build_progress.py`. Needs nothing but git, the standard library and pip's `wheel`,
so it can run before the package is installed: `python -m tools.build_horovod [--install]` in the project folder.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from .build_progress import run_shown
from .signals import INTERRUPTED, ended_cleanly

HOROVOD_VERSION = "0.28.1"
SDIST_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
_KEYED = ("CC", "CXX", "CFLAGS", "CXXFLAGS", "CPPFLAGS", "LDFLAGS")
_CHANGES_A_BUILD = re.compile(
    r"(?:HOROVOD|CMAKE|PIP|NVCC|CUDA|MAKE|GNUMAKE)[A-Z0-9_]*|[A-Z]*FLAGS|C_INCLUDE_PATH|CPLUS_INCLUDE_PATH|CPATH|"
    r"LIBRARY_PATH|CCC_OVERRIDE_OPTIONS|PYTHONPATH|PYTHONHOME|ARCHFLAGS"
)
BUILD_FLAGS = {
    "HOROVOD_WITH_PYTORCH": "1",
    "HOROVOD_WITHOUT_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    # CMake 4 refuses the old minimum versions that the bundled libraries ask for, unless set otherwise.
    "CMAKE_POLICY_VERSION_MINIMUM": "3.5",
}
GIB_PER_COMPILER = 2
PATCHES = Path(__file__).parent / "horovod" / "patches"
_STANDARD = b"@CXX_STANDARD@"  # in a patch: the number of the C++ standard to build with
_NO_GIT = "no git, which applies the patches: apt-get install -y git"


class BuildError(Exception):
    """The wheel cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Target:
    """What the wheel is built for."""

    python: str
    python_tag: str
    torch: str
    cxx_standard: int

    @property
    def native_key(self) -> str:
        """Key of the wheel with the compiled part as it should be, and Horovod's own Python files."""
        patches = [patch.read_bytes() for patch in patches_of("native")]
        recipe = repr((SDIST_SHA256, patches, sorted(BUILD_FLAGS.items()), self.cxx_standard, *_compiler_settings()))
        return f"native-{HOROVOD_VERSION}-torch-{self.torch}-{self.python_tag}-{_digest(recipe)}"

    @property
    def key(self) -> str:
        recipe = repr((self.native_key, [patch.read_bytes() for patch in patches_of("python")]))
        return f"horovod-{HOROVOD_VERSION}-torch-{self.torch}-{self.python_tag}-{_digest(recipe)}"


def _compiler_settings(environ: Mapping[str, str] = os.environ) -> list[tuple[str, str]]:
    """What the environment says of compilers. Part of the key, so a wheel is only used where it would be built so."""
    return [(name, environ[name]) for name in _KEYED if environ.get(name)]


def build_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Without variables that would change the wheel and are not part of its key."""
    return {name: value for name, value in environ.items() if name in _KEYED or not _CHANGES_A_BUILD.fullmatch(name)}


def _digest(recipe: str) -> str:
    return hashlib.sha256(recipe.encode()).hexdigest()[:10]


def cxx_standard(torch_config: str) -> int:
    """The C++ standard torch was built with, from `torch.__config__.show()`, as CMake wants it (e.g. 20)."""
    found = re.search(r"C\+\+ Version: (\d{4})\d\d", torch_config)
    if found is None:
        raise BuildError(
            "torch.__config__.show() has no line 'C++ Version: YYYYMM', so the C++ standard to build with is unknown; "
            "this torch is not one this script knows, install the version in requirements.txt"
        )
    return int(found.group(1)) % 100


def patches_of(kind: str) -> list[Path]:
    """The patch files in the order in which they are applied. kind: native or python. Raises BuildError for none."""
    found = sorted((PATCHES / kind).glob("*.patch"))
    if not found:
        where = PATCHES / kind
        raise BuildError(f"no patches in {where}: Horovod is not built without them; check the repository out again")
    return found


def apply_patches(source: Path, std: int, patches: Sequence[Path]) -> None:
    """Change an unpacked source or wheel in place. Raises BuildError if a patch does not apply exactly."""
    if shutil.which("git") is None:
        raise BuildError(_NO_GIT)
    # No configuration of the user's, and no repository that the folder happens to be in: git would skip its files.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environ |= {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    environ |= {"GIT_CEILING_DIRECTORIES": str(source.resolve().parent), "LC_ALL": "C"}
    for patch in patches:
        text = patch.read_bytes().replace(_STANDARD, str(std).encode())
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        done = subprocess.run(command, check=False, capture_output=True, cwd=source, env=environ, input=text)
        if done.returncode != 0:
            raise BuildError(
                f"{patch.name} does not apply in {source}; the patches are written for Horovod {HOROVOD_VERSION}, "
                f"adapt {patch}. git's message:\n{done.stderr.decode(errors='replace').strip()}"
            )


def table() -> str:
    """The patches in Markdown, one a row: what it changes, the files, the test that exercises it."""
    rows = ["| what it changes, and what happens without it | files | test |", "|---|---|---|"]
    for patch in (*patches_of("native"), *patches_of("python")):
        text = patch.read_text()
        header = HeaderParser().parsestr(text)
        files = ", ".join(f"`{path}`" for path in re.findall(r"^\+\+\+ b/(\S+)$", text, re.MULTILINE))
        rows.append(f"| {' '.join(header['Description'].split())} | {files} | `{header['Test']}` |")
    return "\n".join(rows) + "\n"


def check_sha256(path: Path, expected: str = SDIST_SHA256) -> None:
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != expected:
        raise BuildError(
            f"{path.name}: expected sha256 {expected}, got {found}; the download is damaged or not the published one"
        )


def find_target(python: str) -> Target:
    """Ask an interpreter for its tag and its torch."""
    probe = (
        "import sys, sysconfig, torch\n"
        "print(f'cp{sys.version_info[0]}{sys.version_info[1]}-' + sysconfig.get_platform().replace('-', '_'))\n"
        "print(torch.__version__)\nprint(torch.__config__.show())"
    )
    asked = subprocess.run([python, "-c", probe], check=False, capture_output=True, text=True)
    if asked.returncode != 0:
        raise BuildError(
            f"{python} cannot import torch, which Horovod is built against; run `make setup` "
            f"(or install requirements.txt first):\n{asked.stderr.strip()[-500:]}"
        )
    tag, torch_version, config = asked.stdout.split("\n", 2)
    return Target(python, tag, torch_version, cxx_standard(config))


def missing_tools(python_bin: Path) -> list[str]:
    """What the build needs and the machine lacks, one sentence each with the command that installs it."""
    missing = []
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        missing.append("no C++ compiler (g++): apt-get install -y g++")
    if shutil.which("make") is None:
        missing.append("no make: apt-get install -y make")
    if shutil.which("git") is None:
        missing.append(_NO_GIT)
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("no Python headers (Python.h): apt-get install -y python3-dev")
    if find_cmake(python_bin) is None:
        missing.append("no cmake: pip install cmake, or apt-get install -y cmake")
    return missing


def find_cmake(python_bin: Path) -> str | None:
    return shutil.which("cmake", path=str(python_bin)) or shutil.which("cmake")


def compiler_jobs() -> int:
    """One compiler per core, as far as the memory goes."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(os.cpu_count() or 1, int(memory / (GIB_PER_COMPILER << 30))))


def cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "gba-hvd" / "wheels"


def cached_wheel(folder: Path) -> Path | None:
    wheels = sorted(folder.glob("horovod-*.whl")) if folder.is_dir() else []
    return next((wheel for wheel in wheels if zipfile.is_zipfile(wheel) and has_library(wheel)), None)


def has_library(wheel: Path) -> bool:
    """Whether the compiled part is where Python will look for it."""
    with zipfile.ZipFile(wheel) as archive:
        return any(re.fullmatch(r"horovod/torch/mpi_lib[^/]*\.so", name) for name in archive.namelist())


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a file lock, so that two builds of the same wheel do not meet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another build of this wheel is running, waiting for it ({path})", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """An empty folder that goes again. The caller holds the lock, so what lies there is of a build that was killed."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def fetch_sdist(python: str, folder: Path) -> Path:
    """Download the source distribution with pip (its indexes, its proxies), checked before anything in it runs."""
    wanted = folder / "wanted.txt"
    wanted.write_text(f"horovod=={HOROVOD_VERSION} --hash=sha256:{SDIST_SHA256}\n")
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "horovod"]
    command += ["--no-build-isolation", "--require-hashes", "--dest", str(folder), "--requirement", str(wanted)]
    fetched = subprocess.run(command, check=False, capture_output=True, text=True)
    sdist = folder / f"horovod-{HOROVOD_VERSION}.tar.gz"
    if fetched.returncode != 0 or not sdist.is_file():
        raise BuildError(
            f"cannot download horovod-{HOROVOD_VERSION}.tar.gz; is the package index reachable? pip's message:\n"
            + (fetched.stderr or fetched.stdout).strip()[-1500:]
        )
    check_sha256(sdist)
    return sdist


def build(target: Target, cache: Path) -> Path:
    """Return the wheel for `target`, from the cache or newly made."""
    folder = cache / target.key
    if (wheel := cached_wheel(folder)) is not None:
        return wheel
    with locked(cache / f"{target.key}.lock"):
        if (wheel := cached_wheel(folder)) is not None:
            return wheel
        return _patch_python(target, build_native(target, cache), cache)


def build_native(target: Target, cache: Path) -> Path:
    """The wheel with the compiled part, from the cache or newly built (minutes)."""
    folder = cache / target.native_key
    if (wheel := cached_wheel(folder)) is not None:
        return wheel
    with locked(cache / f"{target.native_key}.lock"):
        if (wheel := cached_wheel(folder)) is not None:
            return wheel
        if missing := missing_tools(Path(target.python).parent):
            raise BuildError("cannot build Horovod on this machine yet:\n  " + "\n  ".join(missing))
        return _build_locked(target, cache, folder)


def _patch_python(target: Target, native: Path, cache: Path) -> Path:
    """Change Python files within a built wheel; the `wheel` tool writes their new checksums."""
    with scratch_folder(cache / f".patching-{target.key}") as work:
        wheel_tool = [target.python, "-m", "wheel"]
        _run_wheel([*wheel_tool, "unpack", "--dest", str(work / "unpacked"), str(native)])
        (unpacked,) = (work / "unpacked").iterdir()
        apply_patches(unpacked, target.cxx_standard, patches_of("python"))
        (work / "packed").mkdir()
        _run_wheel([*wheel_tool, "pack", "--dest-dir", str(work / "packed"), str(unpacked)])
        return _keep(work / "packed", cache / target.key, f"`wheel pack` of {native}")


def _run_wheel(command: list[str]) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()[-1500:]
        raise BuildError(f"`{' '.join(command[1:4])}` failed; is the package `wheel` installed? Its message:\n{output}")


def _keep(made: Path, folder: Path, by: str) -> Path:
    """Move the wheel to its place in the cache: a rename, so that the cache holds a whole wheel or none."""
    wheel = cached_wheel(made)
    if wheel is None:
        raise BuildError(
            f"{by} finished but left no wheel with horovod/torch's library in {made}; is there a special character in "
            f"the path of {folder}? XDG_CACHE_HOME names another one"
        )
    folder.mkdir(parents=True, exist_ok=True)
    return wheel.rename(folder / wheel.name)


def _build_locked(target: Target, cache: Path, folder: Path) -> Path:
    # Horovod's CMakeLists takes its own path for a regular expression: a "+" in it puts the library in a wrong place.
    with scratch_folder(cache / f".building-{re.sub(r'[^A-Za-z0-9._-]', '-', target.native_key)}") as work:
        print(
            f"building Horovod {HOROVOD_VERSION} for torch {target.torch} (C++{target.cxx_standard}), once", flush=True
        )
        sdist = fetch_sdist(target.python, work)
        with tarfile.open(sdist) as archive:
            archive.extractall(work)  # its checksum is known, so nothing in it can surprise
        source = work / f"horovod-{HOROVOD_VERSION}"
        apply_patches(source, target.cxx_standard, patches_of("native"))
        cmake = find_cmake(Path(target.python).parent)
        assert cmake is not None, "missing_tools has looked"
        settings = {**BUILD_FLAGS, "HOROVOD_CMAKE": cmake, "MAKEFLAGS": f"-j{compiler_jobs()}"}
        command = [target.python, "-m", "pip", "wheel", "-v", "--no-index", "--no-deps", "--no-build-isolation"]
        command += ["--use-pep517", "--wheel-dir", str(work / "wheel"), "."]
        log = cache / f"{target.native_key}.log"
        if run_shown(command, cwd=source, env={**build_environment(), **settings}, log=log) != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
            raise BuildError(f"building Horovod failed; the last lines of {log}:\n{tail}\nthe whole log is {log}")
        return _keep(work / "wheel", folder, f"pip (its log is {log})")


def is_installed(wheel: Path) -> bool:
    """Whether this interpreter's Horovod was installed from this very wheel."""
    try:
        origin = distribution("horovod").read_text("direct_url.json")
    except PackageNotFoundError:
        return False
    return origin is not None and json.loads(origin).get("url") == wheel.as_uri()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build (or find) the Horovod wheel for this interpreter's torch.")
    parser.add_argument("--install", action="store_true", help="install the wheel into this interpreter's environment")
    parser.add_argument("--table", action="store_true", help="print the table of docs/HOROVOD.md, and build nothing")
    args = parser.parse_args(argv)
    if args.table:
        print(table(), end="")
        return 0
    try:
        with ended_cleanly():
            wheel = build(find_target(sys.executable), cache_dir())
    except BuildError as error:
        print(f"build_horovod: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("build_horovod: interrupted", file=sys.stderr)
        return INTERRUPTED
    print(f"Horovod wheel: {wheel}", flush=True)
    if not args.install or is_installed(wheel):
        return 0
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--force-reinstall"]
    return subprocess.run([*command, str(wheel)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
