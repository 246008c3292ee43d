"""Which experiment of MLflow a run is asked to be in: as MLflow finds it, else one of our own."""

from __future__ import annotations

import os
from dataclasses import dataclass

DEFAULT = "gba-hvd"


@dataclass(frozen=True, slots=True)
class AskedExperiment:
    """name: "" where none is asked for. id: of $MLFLOW_EXPERIMENT_ID, where no name is."""

    name: str = ""
    id: str | None = None

    @classmethod
    def of(cls, name: str | None) -> AskedExperiment:
        name = name or os.environ.get("MLFLOW_EXPERIMENT_NAME") or ""
        return cls(name, None if name else os.environ.get("MLFLOW_EXPERIMENT_ID") or None)

    @property
    def is_asked(self) -> bool:
        return bool(self.name or self.id)
