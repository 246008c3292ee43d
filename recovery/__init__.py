"""Checkpoints that cost a fraction of a percent of training, and recovery of what was lost only.

For any PyTorch model with large tables of rows. The packages read as the flow:

    rows -> selection (which rows) -> schedule (when) -> write -> format -> storage -> catalog -> restore

Knows arrays and rows; nothing of Horovod, and never imports `gba_hvd`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from recovery.errors import BadInput, Damaged, Fenced, ProjectError, RecoveryError, StoreError

if TYPE_CHECKING:
    from recovery.callback import CheckpointCallback
    from recovery.checkpointer import Checkpointer, Event, Handle, Saved
    from recovery.config import Config
    from recovery.process_checkpointer import ProcessCheckpointer
    from recovery.restore import Report, TrainingPoint
    from recovery.restore.open_checkpoint import OpenCheckpoint, TableInfo, open_checkpoint
    from recovery.storage.open import open_store
    from recovery.torch_rows.tensor_rows import RowParts, TensorRows, dense_state, load_dense_state, of_optimizer

__all__ = [
    "BadInput",
    "CheckpointCallback",
    "Checkpointer",
    "Config",
    "Damaged",
    "Event",
    "Fenced",
    "Handle",
    "OpenCheckpoint",
    "ProcessCheckpointer",
    "ProjectError",
    "RecoveryError",
    "Report",
    "RowParts",
    "Saved",
    "StoreError",
    "TableInfo",
    "TensorRows",
    "TrainingPoint",
    "dense_state",
    "load_dense_state",
    "of_optimizer",
    "open_checkpoint",
    "open_store",
]

# Loaded when they are asked for: a process that only needs the errors does not wait for torch.
_IN = {
    "callback": ("CheckpointCallback",),
    "checkpointer": ("Checkpointer", "Event", "Handle", "Saved"),
    "config": ("Config",),
    "process_checkpointer": ("ProcessCheckpointer",),
    "restore": ("TrainingPoint", "Report"),
    "restore.open_checkpoint": ("OpenCheckpoint", "TableInfo", "open_checkpoint"),
    "storage.open": ("open_store",),
    "torch_rows.tensor_rows": ("RowParts", "TensorRows", "load_dense_state", "of_optimizer", "dense_state"),
}
_OLD = {"Now": "TrainingPoint", "Parts": "RowParts", "load_rest": "load_dense_state", "rest": "dense_state"}
_MODULE = {name: module for module, names in _IN.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _OLD:
        from recovery.old_names import warn

        warn(f"recovery.{name}", f"recovery.{_OLD[name]}")
        name = _OLD[name]
    if name not in _MODULE:
        raise AttributeError(f"module 'recovery' has no attribute {name!r}")
    return getattr(import_module(f"recovery.{_MODULE[name]}"), name)
