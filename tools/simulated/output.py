"""Figures of simulated training as JSON and as text."""

from __future__ import annotations

from typing import Any


def json_values(value: Any) -> Any:
    """JSON has no infinity: a loss that diverged is null."""
    if isinstance(value, dict):
        return {key: json_values(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_values(v) for v in value]
    return None if isinstance(value, float) and value == float("inf") else value


def loss_text(loss: float) -> str:
    return "diverged" if loss == float("inf") else f"{loss:.4g}"
