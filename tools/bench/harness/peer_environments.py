"""Where the systems are installed that we compare with, under .peers/ (ignored by git)."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

PEERS = Path(__file__).resolve().parents[3] / ".peers"

TORCHSNAPSHOT = ("torchsnapshot==0.1.0", "aiofiles==25.1.0", "nest-asyncio==1.6.0")


def torchrec_environment() -> dict[str, str] | None:
    """What this Python needs to import TorchRec; None where `make setup` has not installed it."""
    models = PEERS / "models"
    if not (models / "torchrec").is_dir():
        return None
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(models), os.environ.get("PYTHONPATH"))))}


def torchsnapshot_python() -> Path:
    """Python of an environment of its own that has torchsnapshot, and everything else from the project's.

    Made on demand. Raises CalledProcessError when it cannot be installed.
    """
    home, wanted = PEERS / "torchsnapshot", "\n".join((sys.executable, *TORCHSNAPSHOT))
    python, ready = home / "bin" / "python", home / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return python
    print(f"installing {TORCHSNAPSHOT[0]} into {home} (once)", flush=True)
    venv.create(home, with_pip=False, clear=True)
    (PEERS / ".gitignore").write_text("*\n")
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "project.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, *TORCHSNAPSHOT], check=True)
    subprocess.run([str(python), "-W", "ignore", "-c", "import torchsnapshot"], check=True)
    ready.write_text(wanted)
    return python
