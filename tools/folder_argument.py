"""The folder that a command line names: it has to be there."""

from __future__ import annotations

from pathlib import Path

from gba_hvd.config import Config
from recovery.errors import BadInput


def existing_folder(folder: Path, advice: str) -> Path:
    """The folder. Raises BadInput, which ends with the advice, where there is none."""
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder}: {advice}")
    return folder


def shard_folder(named: Path | None) -> Path:
    """Where shards lie: the folder that `--dir` names, else that of the environment. Raises BadInput without one."""
    advice = "name the one that shards lie in with --dir, or GBA_HVD_SHARD_DIR"
    return existing_folder(Config.from_env(shard_dir=named).shard_dir, advice)
