"""Functions of the script that run once per global step."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from gba_hvd.training.step_hooks import StepHooks

_TOO_EARLY = "Detected call of `lr_scheduler.step"


def test_a_worker_that_joins_catches_up_without_the_warning_of_torch_which_a_script_still_gets() -> None:
    """The steps were made before it joined: its own optimizer has made none."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    of_steps, of_the_loop = StepLR(optimizer, 2, 0.5), StepLR(optimizer, 100)
    hooks = StepHooks(optimizer)
    hooks.functions.append(of_steps.step)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.run(4)
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.warns(UserWarning, match=_TOO_EARLY):
        of_the_loop.step()
    optimizer.step()
    hooks.run(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        StepLR(optimizer, 100).step()
