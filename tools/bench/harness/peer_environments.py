"""Virtual environments of the systems we compare with, made on demand under .peers/ (ignored by git)."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

PEERS = Path(__file__).resolve().parents[3] / ".peers"

# fbgemm 1.9.0 does not load with torch 2.13. Without --no-deps torchrec asks for the CUDA build of fbgemm.
TORCHREC = (
    "torchrec==1.8.0",
    "fbgemm-gpu-cpu==1.8.0",
    "lightning-utilities==0.15.3",
    "pyre-extensions==0.0.32",
    "pyvers==0.2.3",
    "tensordict==0.15.3",
    "torchmetrics==1.0.3",
    "tqdm==4.70.1",
    "typing-inspect==0.9.0",
)

TORCHSNAPSHOT = ("torchsnapshot==0.1.0", "aiofiles==25.1.0", "nest-asyncio==1.6.0")


def torchrec_python() -> Path:
    """The Python that has TorchRec 1.8. Raises CalledProcessError when it cannot be installed."""
    return _python("torchrec", TORCHREC)


def installed(module: str) -> Path | None:
    """The Python of an environment that was made before, as it is now wanted; None: there is none."""
    home, packages = PEERS / module, {"torchrec": TORCHREC, "torchsnapshot": TORCHSNAPSHOT}[module]
    ready = home / ".ready"
    is_ready = ready.exists() and ready.read_text() == _wanted(packages)
    return home / "bin" / "python" if is_ready else None


def torchsnapshot_python() -> Path:
    """The Python that has torchsnapshot. Raises CalledProcessError when it cannot be installed."""
    return _python("torchsnapshot", TORCHSNAPSHOT)


def _python(module: str, packages: Sequence[str]) -> Path:
    """Python of an environment with these packages, which takes torch and everything else from the project's."""
    if (there := installed(module)) is not None:
        return there
    home = PEERS / module
    python, ready = home / "bin" / "python", home / ".ready"
    print(f"installing {packages[0]} into {home} (once)", flush=True)
    venv.create(home, with_pip=False, clear=True)
    (PEERS / ".gitignore").write_text("*\n")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *packages], check=True)
    subprocess.run([str(python), "-W", "ignore", "-c", f"import {module}"], check=True)
    ready.write_text(_wanted(packages))
    return python


def _wanted(packages: Sequence[str]) -> str:
    return "\n".join((sys.executable, *packages))
