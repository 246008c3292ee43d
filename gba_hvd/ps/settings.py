"""The settings a companion server starts with: `ps.json` in the job's folder, written by the worker that starts it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Settings:
    """layout: `Layout.describe`. row_optimizer: `launch.describe_optimizer`. address: the IP address to listen at.

    alive_s: after so long without a heartbeat a worker's leases go to others; lease_s: how long one may take
    buffer_bytes: of pushes that wait for their step, at most; grace_s: what the memory outlives the workers by
    sys_path: where the script finds its modules: the server looks there, too, after its own
    """

    job: str
    layout: dict[str, Any]
    row_optimizer: dict[str, Any]
    address: str
    alive_s: float = 2.0
    lease_s: float = 60.0
    buffer_bytes: int = 4 << 30
    grace_s: float = 20.0
    sys_path: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Settings:
        return cls(**json.loads((folder / "ps.json").read_text()))
