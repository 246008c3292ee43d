"""Checkpoints that cost a fraction of a percent of training, and recovery of what was lost only.

For any PyTorch model with large tables of rows. The listing reads as the flow:

    rows -> tracker -> priority -> planner -> snapshot -> writer -> store -> manifest -> restore

Knows arrays and rows; nothing of Horovod, and never imports `gba_hvd`.
"""

from __future__ import annotations

from recovery.errors import BadInput, Damaged, RecoveryError, StoreError

__all__ = ["BadInput", "Damaged", "RecoveryError", "StoreError"]
