"""What `gba-hvd doctor` looks at: one function per check, each giving a finding with its advice.

Every function takes the edge it touches (imports, files, processes, the resolver) as an argument with a default, so
that a test can give it a machine in any state.
"""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from gba_hvd.config import Config
from gba_hvd.shm import memory_limit
from gba_hvd.shm.mapped_file import has_huge_pages
from gba_hvd.shm.sweep import counted, free_and_held, held_elsewhere, orphaned_memory

from .allreduce_probe import loopback_job, run_group

MIB = 1 << 20
GIB = 1 << 30
SMALL_SHARD_MEMORY = GIB
ALLREDUCE_TIMEOUT_S = 90.0

Importer = Callable[[str], ModuleType]


@dataclass(frozen=True)
class Finding:
    """What one check found; `advice` says what to do unless all is well."""

    name: str
    status: Literal["ok", "warning", "FAIL"]
    found: str
    advice: str = ""


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> Finding:
    found = ".".join(map(str, version))
    if version >= (3, 11):
        return Finding("python", "ok", f"{found} ({sys.executable})")
    return Finding("python", "FAIL", f"{found}, needed is 3.11 or newer", "make setup PYTHON=/path/to/python3.11")


def check_machine(machine: str = platform.machine()) -> Finding:
    from gba_hvd.errors import ShardMemoryError
    from gba_hvd.shm.shard_memory import refuse_machine

    try:
        refuse_machine(machine)
    except ShardMemoryError as error:
        return Finding("machine", "FAIL", machine, str(error))
    return Finding("machine", "ok", machine)


def check_torch(load: Importer = importlib.import_module) -> Finding:
    try:
        torch: Any = load("torch")
    except ImportError as error:
        return Finding("torch", "FAIL", f"cannot be imported: {error}", "make setup, or pip install torch==2.13.0")
    found = f"{torch.__version__}, {torch.get_num_threads()} threads"
    if not torch.__version__.startswith("2.13."):
        return Finding(
            "torch", "warning", found + ", tested is 2.13", "pip install torch==2.13.0, then rebuild Horovod"
        )
    return Finding("torch", "ok", found)


def check_kernels(load: Importer = importlib.import_module) -> Finding:
    try:
        load("gba_hvd.kernels").load()
    except ImportError as error:
        return Finding("row kernels", "FAIL", f"cannot be imported: {error}", "make setup, or pip install numba")
    return Finding("row kernels", "ok", "compiled")


def check_horovod(load: Importer = importlib.import_module) -> Finding:
    rebuild = "make setup, or python -m gba_hvd_tools.build_horovod --install"
    try:
        horovod: Any = load("horovod")
    except ImportError as error:
        return Finding("horovod", "FAIL", f"not installed: {error}", rebuild)
    try:
        hvd: Any = load("horovod.torch")
    except Exception as error:  # a wheel built for another torch fails in many ways
        found = f"{horovod.__version__} does not load with this torch: {type(error).__name__}: {error}"
        return Finding("horovod", "FAIL", found, rebuild)
    if not hvd.gloo_built():
        return Finding("horovod", "FAIL", f"{horovod.__version__}, built without gloo", rebuild)
    features = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, f"{name}_built")()]
    return Finding("horovod", "ok", f"{horovod.__version__}, built for torch with {', '.join(features)}")


def check_shard_memory(
    folder: Path | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    writable: Callable[[Path], bool] = lambda folder: os.access(folder, os.W_OK),
    limit_of: Callable[[Path], memory_limit.MemoryLimit | None] = memory_limit.of_folder,
) -> Finding:
    folder = Config.from_env().shard_dir if folder is None else folder
    elsewhere = "or set GBA_HVD_SHARD_DIR to a folder on disk"
    if not folder.is_dir() or not writable(folder):
        found = f"{folder} is {'not writable' if folder.is_dir() else 'not a folder'}"
        return Finding("shard memory", "FAIL", found, f"mount -t tmpfs tmpfs /dev/shm; {elsewhere}")
    free = free_bytes(folder)
    if free < SMALL_SHARD_MEMORY:
        advice = f"in a container: docker run --shm-size=8g; else mount -o remount,size=8g /dev/shm; {elsewhere}"
        return Finding("shard memory", "warning", f"{folder} has only {free / MIB:.0f} MiB free", advice)
    found = f"{folder} has {free / GIB:.1f} GiB free{_pages(folder)}"
    if (limit := limit_of(folder)) is not None and limit.free < free:
        used = f"the container's memory limit is {limit.limit / GIB:.1f} GiB, {limit.used / GIB:.1f} GiB of it in use"
        found += f", but {used} ({limit.file}): workers are killed when they use more"
        if limit.free < SMALL_SHARD_MEMORY:
            advice = f"docker run --memory=8g, Kubernetes: resources.limits.memory; {elsewhere}"
            return Finding("shard memory", "warning", found, advice)
    return Finding("shard memory", "ok", found)


def _pages(folder: Path) -> str:
    """Of tables in this folder, in words; empty where an attempt is not possible."""
    try:
        return f", in pages of {'2 MiB' if has_huge_pages(folder) else '4 KiB'}"
    except OSError:
        return ""


def check_orphaned_memory(folder: Path | None = None) -> Finding:
    """What dead jobs of this user left behind, as `gba-hvd clean` has it."""
    folder = Config.from_env().shard_dir if folder is None else folder
    free, held = free_and_held(orphaned_memory(folder))
    others = [f"{counted(held)} of dead jobs that their keepers will remove"] if held else []
    others += [f"{path.name} is in use, by processes of {container}" for path, container in held_elsewhere(folder)]
    rest = "; ".join(others)
    if not free:
        return Finding("orphaned memory", "ok", rest or "no dead job has left anything")
    names = ", ".join(one.path.name for one in free[:3]) + (", ..." if len(free) > 3 else "")
    found = f"dead jobs left {counted(free)}: {names}" + (f"; beside that {rest}" if rest else "")
    return Finding("orphaned memory", "warning", found, "gba-hvd clean shows it, gba-hvd clean --yes removes it")


def network_interfaces() -> dict[str, str]:
    """Name -> IPv4 address of the interfaces that are up."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and name in up
    }


def check_host_name(
    name: str | None = None,
    resolve: Callable[[str], str] = socket.gethostbyname,
    interfaces: Callable[[], Mapping[str, str]] = network_interfaces,
    environ: Mapping[str, str] = os.environ,
) -> Finding:
    name = socket.gethostname() if name is None else name
    known = interfaces()
    outward = [each for each in known if each != "lo"] or ["<interface>"]
    asked = environ.get("HOROVOD_GLOO_IFACE")
    if asked is not None and asked not in known:
        found = f"HOROVOD_GLOO_IFACE={asked}, but the interfaces here are {', '.join(known)}"
        return Finding("host name", "FAIL", found, f"export HOROVOD_GLOO_IFACE={outward[0]}, or unset it")
    try:
        address = resolve(name)
    except OSError as error:
        advice = f"echo '127.0.0.1 {name}' >> /etc/hosts, or give horovodrun --network-interface lo"
        return Finding("host name", "FAIL", f"{name} does not resolve: {error}", advice)
    if address.startswith("127."):
        found = f"{name} is {address}: fine on one machine, not reachable from others"
        return Finding("host name", "warning", found, f"on several hosts: horovodrun --network-interface {outward[0]}")
    return Finding("host name", "ok", f"{name} is {address}")


def check_allreduce(
    run: Callable[[list[str], float], tuple[int | None, str]] = run_group, timeout_s: float = ALLREDUCE_TIMEOUT_S
) -> Finding:
    """A real job of two processes on this machine."""
    launcher = Path(sys.executable).with_name("horovodrun")
    if not launcher.exists():
        advice = "make setup, or python -m gba_hvd_tools.build_horovod --install"
        return Finding("allreduce", "FAIL", f"no {launcher}: Horovod is not installed in this environment", advice)
    status, output = run(loopback_job(launcher, sys.executable), timeout_s)
    if status == 0:
        return Finding("allreduce", "ok", "2 processes over the loopback interface agree")
    lines = [line for line in output.splitlines() if line.strip()]
    cause = next((line for line in lines if "Error" in line), lines[-1] if lines else "no output")
    happened = f"no result after {timeout_s:.0f} s" if status is None else f"exit status {status}"
    advice = "see the output below; a firewall on lo, or a proxy set for localhost, are the usual causes\n"
    return Finding("allreduce", "FAIL", f"{happened}: {cause.strip()}", advice + "\n".join(lines[-15:]))


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/health", timeout=3):
            return True
    except urllib.error.HTTPError:
        return True  # it refuses the request, but it is there
    except OSError:
        return False


def check_mlflow(
    load: Importer = importlib.import_module,
    environ: Mapping[str, str] = os.environ,
    reachable: Callable[[str], bool] = answers,
) -> Finding:
    try:
        mlflow: Any = load("mlflow")
    except ImportError as error:
        return Finding("mlflow", "FAIL", f"cannot be imported: {error}", "make setup, or pip install mlflow")
    uri = environ.get("MLFLOW_TRACKING_URI", "")
    if uri.startswith("http") and not reachable(uri):
        found = f"{mlflow.__version__}, nothing answers at {uri}"
        return Finding("mlflow", "warning", found, "start it, or unset MLFLOW_TRACKING_URI for a local SQLite file")
    return Finding("mlflow", "ok", f"{mlflow.__version__}, tracks to {uri or 'a local SQLite file'}")


BACK_ENDS = {"file": "fsspec", "memory": "fsspec", "s3": "s3fs", "gs": "gcsfs", "abfs": "adlfs"}


def check_file_systems(load: Importer = importlib.import_module) -> Finding:
    try:
        fsspec: Any = load("fsspec")
    except ImportError as error:
        return Finding("file systems", "FAIL", f"cannot import fsspec: {error}", "make setup, or pip install fsspec")
    there, missing = [], []
    for protocol, package in BACK_ENDS.items():
        try:
            fsspec.get_filesystem_class(protocol)
            there.append(protocol)
        except ImportError:
            missing.append(f"{protocol} (pip install {package})")
    found = f"fsspec {fsspec.__version__} with {', '.join(there)}"
    if missing:
        found += f"; without {', '.join(missing)}"
    if not {"file", "memory"} <= set(there):
        return Finding("file systems", "FAIL", found, "pip install --force-reinstall fsspec")
    if "s3" not in there:
        return Finding("file systems", "warning", found, "for data or checkpoints in S3: pip install s3fs")
    return Finding("file systems", "ok", found)


def check_gpu(load: Importer = importlib.import_module) -> Finding:
    try:
        torch: Any = load("torch")
    except ImportError:
        return Finding("gpu", "ok", "unknown without torch")
    if not torch.cuda.is_available():
        return Finding("gpu", "ok", "none; training runs on the CPU")
    names = {torch.cuda.get_device_name(device) for device in range(torch.cuda.device_count())}
    found = f"{torch.cuda.device_count()} x {', '.join(sorted(names))}; tables stay in the host's memory (docs/GPU.md)"
    return Finding("gpu", "ok", found)
