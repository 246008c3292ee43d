"""Back from a store: rows, state, and what a checkpoint contains."""

from __future__ import annotations

from recovery.restore.restore import Now, Report, restore

__all__ = ["Now", "Report", "restore"]
