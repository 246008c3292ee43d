"""Back from a store: rows, state, and what a checkpoint contains."""

from __future__ import annotations

from recovery.restore.restore import Report, TrainingPoint, restore

__all__ = ["Report", "TrainingPoint", "restore"]
