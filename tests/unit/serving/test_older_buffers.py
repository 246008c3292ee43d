"""A checkpoint that servers made has parameters newer than the buffers of the model, which is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from gba_hvd.serving.module import older_buffers
from recovery import state_codec

AT_START: dict[str, Any] = {"model": {}, "position": {"step": 6}}


@pytest.mark.parametrize(
    ("state", "is_older"),
    [
        ({"snapshot": AT_START, "dense": {}}, True),
        ({"snapshot": {**AT_START, "buffers_step": 12}, "dense": {}}, False),
        ({"snapshot": {**AT_START, "position": {"step": 12}}, "dense": {}}, False),
        (AT_START, False),
    ],
)
@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2)])
def test_buffers_of_an_older_step_are_named(model: nn.Module, state: dict[str, Any], is_older: bool) -> None:
    checkpoint = SimpleNamespace(name="manifests/1-12", step=12, state=lambda: state_codec.encode(state))
    found = older_buffers(model, checkpoint)  # type: ignore[arg-type]
    if isinstance(model, nn.Linear) or not is_older:
        assert found == ""
    else:
        assert "buffers (1.running_mean, 1.running_var, 1.num_batches_tracked) are those of step 6" in found
        assert "parameters and rows those of step 12" in found
