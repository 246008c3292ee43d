"""The stack of fully connected layers that all three models share."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


def mlp(n_inputs: int, hidden: Sequence[int], *, batch_norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    """Linear, batch norm, ReLU, dropout for each width in `hidden`; [B, n_inputs] -> [B, hidden[-1]].

    Batch norm takes its statistics from the micro-batch, so the quality depends on B, not on the number of workers.
    """
    layers: list[nn.Module] = []
    for width in hidden:
        layers.append(nn.Linear(n_inputs, width))
        if batch_norm:
            layers.append(nn.BatchNorm1d(width))
        layers.append(nn.ReLU())
        if dropout > 0:
            layers.append(nn.Dropout(dropout))
        n_inputs = width
    return nn.Sequential(*layers)
