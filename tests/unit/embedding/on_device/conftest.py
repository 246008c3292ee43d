"""Tests run on a CPU through the code that a GPU runs, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    monkeypatch.setenv("GBA_HVD_DEVICE_ROWS", "on")
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")
