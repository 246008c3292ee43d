"""Whether a job's dense model and optimizer are those of the training state that it resumes from.

Decided here: what differs, in words. Rows, sizes of batches and compression are compared where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gba_hvd.errors import BadInput
from gba_hvd.torch_optimizers import user_class

_N_NAMED = 5
_ADDED = {"gba_hvd", "params", "param_names"}  # of a group, which are no hyper-parameters


def refuse_other_optimizer(where: str, state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> None:
    """Raises BadInput where `state` (`TrainingState.state_dict`) is of another dense optimizer.

    where: what it was read from, as in "the checkpoint at s3://runs/7"
    """
    _refuse(where, _other_optimizer(state, optimizer))


def refuse_other_tensors(where: str, state: Mapping[str, Any], model: nn.Module) -> None:
    """Raises BadInput where `state`, which the model did not load, has tensors of other names or sizes."""
    _refuse(where, _other_tensors(state["model"], model.state_dict()))


def _refuse(where: str, found: str) -> None:
    if found:
        raise BadInput(
            f"{where} is of a job with {found}: continue with what it has, or start over at another url or with "
            "resume=False"
        )


def _other_tensors(saved: Mapping[str, Any], mine: Mapping[str, Any]) -> str:
    found = []
    for name in dict.fromkeys((*saved, *mine)):
        theirs, ours = _size(saved, name), _size(mine, name)
        if theirs != ours:
            found.append(f"{theirs} {name!r}, this one has {ours}")
    more = len(found) - _N_NAMED
    return "; ".join(found[:_N_NAMED]) + (f"; and {more} more" if more > 0 else "")


def _size(tensors: Mapping[str, Any], name: str) -> str:
    if name not in tensors:
        return "no"
    value = tensors[name]
    return str(list(value.shape)) if isinstance(value, Tensor) else "a value"


def _other_optimizer(state: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> str:
    """Checkpoints of earlier versions do not name the class: there, hyper-parameters that only one of both has tell."""
    saved = state.get("optimizer_class")
    theirs, ours = _groups(state["optimizer"]["param_groups"]), _groups(optimizer.state_dict()["param_groups"])
    mine = user_class(optimizer).__qualname__
    if saved is not None and saved != mine:
        return f"the dense optimizer {saved}, this one has {mine}"
    if len(theirs) != len(ours):
        return f"{len(theirs)} groups of dense parameters, this one has {len(ours)}"
    for number, ((n_theirs, settings), (n_ours, own)) in enumerate(zip(theirs, ours, strict=True)):
        if n_theirs != n_ours:
            return f"{n_theirs} parameters in the optimizer's group {number}, this one has {n_ours}"
        if saved is None and settings - own and own - settings:
            names = ", ".join(sorted(settings - own))
            return f"another dense optimizer, which has {names}, this one is {mine}, which has not"
    return ""


def _groups(groups: Sequence[Mapping[str, Any]]) -> list[tuple[int, set[str]]]:
    """Of each group but that of the tables: how many parameters, and the names of its hyper-parameters."""
    return [(len(one["params"]), {*one} - _ADDED) for one in groups if one.get("gba_hvd") != "tables"]
