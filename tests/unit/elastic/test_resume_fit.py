"""Another dense model or optimizer than the one that was saved is refused, and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gba_hvd import BadInput
from gba_hvd.elastic.resume_fit import refuse_other_optimizer
from gba_hvd.membership.resume_job import ResumedFromMemory
from recovery import state_codec
from recovery.errors import Damaged

WHERE = "the checkpoint at file:///runs (manifests/1.json)"


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def saved(job: Any, *, of_earlier_version: bool = False) -> Any:
    state = state_codec.decode(state_codec.encode(job.state.training_state.state_dict()))
    if of_earlier_version:
        del state["optimizer_class"]
    return state


@pytest.mark.parametrize("of_earlier_version", [False, True])
@pytest.mark.parametrize("dense", [adam, momentum, torch.optim.AdamW])
def test_the_same_model_and_optimizer_fit(training: Any, dense: Callable[..., Any], of_earlier_version: bool) -> None:
    state = saved(training(dense=dense), of_earlier_version=of_earlier_version)
    job = training(dense=dense)
    refuse_other_optimizer(WHERE, state, job.state.optimizer)
    job.state.training_state.resume(state, WHERE)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (adam, momentum, "is of a job with the dense optimizer Adam, this one has SGD: continue with what it has"),
        (adam, torch.optim.AdamW, "the dense optimizer Adam, this one has AdamW"),
        (lambda p: adam([{"params": [one]} for one in p]), adam, "4 groups of dense parameters, this one has 1"),
    ],
)
def test_another_dense_optimizer_is_refused(
    training: Any, before: Callable[..., Any], after: Callable[..., Any], said: str
) -> None:
    state, job = saved(training(dense=before)), training(dense=after)
    with pytest.raises(BadInput) as refused:
        job.state.training_state.resume(state, WHERE)
    assert str(refused.value).startswith(f"{WHERE} is of a job with ") and said in str(refused.value)
    assert str(refused.value).endswith("or start over at another url or with resume=False")


def test_in_a_checkpoint_of_an_earlier_version_hyper_parameters_tell_the_optimizer(training: Any) -> None:
    state, job = saved(training(dense=adam), of_earlier_version=True), training(dense=momentum)
    with pytest.raises(
        BadInput, match=r"another dense optimizer, which has amsgrad, betas, .*, this one is SGD, which"
    ):
        job.state.training_state.resume(state, WHERE)


def test_a_dense_layer_of_another_width_is_refused_by_name_with_both_sizes(training: Any) -> None:
    state, job = saved(training()), training()
    job.state.model.mlp[0], job.state.model.mlp[2] = nn.Linear(9, 12), nn.Linear(12, 1, bias=False)
    with pytest.raises(BadInput) as refused:
        job.state.training_state.resume(state, WHERE)
    said = str(refused.value)
    assert "is of a job with [6, 9] 'mlp.0.weight', this one has [12, 9]; [6] 'mlp.0.bias', this one has [12]" in said
    assert "[1] 'mlp.2.bias', this one has no" in said


@pytest.mark.parametrize(
    ("state", "lacks"),
    [
        ({"model": {}, "epoch": 3}, "lacks optimizer, values, position, callbacks: "),
        ([1, 2], "lacks model, optimizer, values, position, callbacks: "),
        ({"snapshot": {}}, "lacks dense, position: "),
        ({"snapshot": None, "dense": {}, "position": {}}, "lacks model, optimizer, values, position, callbacks: "),
    ],
)
def test_a_state_of_another_program_is_refused_with_the_checkpoint(training: Any, state: Any, lacks: str) -> None:
    with pytest.raises(Damaged) as refused:
        training().state.training_state.resume(state, WHERE)
    assert str(refused.value).startswith(f"{WHERE}: its training state {lacks}another program wrote it")


def test_a_resume_from_bytes_that_cannot_be_read_says_where_they_were(training: Any) -> None:
    with pytest.raises(Damaged, match=r"^what the launch before left in memory: its 4 bytes of training state cannot"):
        training().state._resume(ResumedFromMemory(3, 0, "all is there", b"junk"))
