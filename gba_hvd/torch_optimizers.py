"""The user's torch optimizer as a description that travels, and an optimizer built from one.

Worker and server step the same class with the same hyper-parameters. What travels is the class's name and the plain
hyper-parameters of its groups; tensors and optimizer state travel elsewhere. Decided here: which classes may travel.
A class of `torch.optim` always may; one of the user's own after `register_optimizer`. The other side imports it by
module and name, so state that a class has outside `param_groups` and `state` does not travel.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import BadInput
from gba_hvd.extras import module_of

OptimizerClass = TypeVar("OptimizerClass", bound=type[torch.optim.Optimizer])

_registered: set[type[torch.optim.Optimizer]] = set()


def register_optimizer(kind: OptimizerClass) -> OptimizerClass:
    """Allow an optimizer class of one's own in the asynchronous modes; also usable as a class decorator.

    The server imports the class by its module and name, so it must stand at the top level of a module that every host
    can import, and keep all it remembers in `param_groups` and `state`.

    Raises BadInput when the class cannot be imported that way, or needs a closure or sparse gradients.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise BadInput(f"register_optimizer takes a subclass of torch.optim.Optimizer, got {kind!r}")
    _check_usable(kind)
    if kind.__module__ == "__main__":
        raise BadInput(
            f"optimizer {kind.__qualname__} is defined in the script itself (__main__), which the server cannot "
            "import: move the class to a module next to the script and import it from there"
        )
    # The class decorator runs before the module has the name, so only what cannot work at all is refused here.
    if "<locals>" in kind.__qualname__:
        raise BadInput(
            f"optimizer {kind.__qualname__} is defined inside a function, where the server cannot import it: "
            f"move the class to the top level of {kind.__module__}"
        )
    _registered.add(kind)
    return kind


def spec_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What another process needs to build this optimizer: JSON values only.

    {"class": "torch.optim.adam:Adam", "groups": [hyper-parameters of each group]}. The group that DistributedOptimizer
    adds for the tables is left out; it is the last, so the other groups keep their numbers.

    Raises BadInput for a class that is not registered or cannot be used, and for hyper-parameters that are no plain
    values.
    """
    kind = user_class(optimizer)
    _check_usable(kind)
    if getattr(torch.optim, kind.__name__, None) is not kind and kind not in _registered:
        raise BadInput(
            f"{kind.__module__}.{kind.__qualname__} is no class of torch.optim: call "
            f"gba_hvd.register_optimizer({kind.__name__}) on every worker, so that the servers may import it"
        )
    groups = [
        {
            name: _to_plain(value, f"{kind.__name__} group {number}: {name}")
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        for number, group in enumerate(optimizer.param_groups)
        if group.get("gba_hvd") != "tables"
    ]
    return {"class": f"{kind.__module__}:{kind.__qualname__}", "groups": groups}


def build(spec: Mapping[str, Any], params_by_group: Sequence[Sequence[Tensor]]) -> torch.optim.Optimizer:
    """An optimizer as described by `spec_of`, over these CPU tensors: one sequence per group, which may be empty.

    Raises BadInput for a description that fits no class that can be imported here.
    """
    if not isinstance(spec.get("class"), str) or not isinstance(spec.get("groups"), list):
        raise BadInput(f"an optimizer's description has 'class' and 'groups', got {sorted(map(str, spec))}")
    kind = resolve(spec["class"])
    if len(spec["groups"]) != len(params_by_group):
        raise BadInput(f"{spec['class']} has {len(spec['groups'])} groups, parameters came for {len(params_by_group)}")
    groups: list[dict[str, Any]] = []
    for hyper, params in zip(spec["groups"], params_by_group, strict=True):
        group = {name: _from_plain(value) for name, value in hyper.items()}
        if group.get("capturable"):
            group["capturable"] = False  # for graphs on a GPU, refused on the CPU; the same formula
        groups.append({**group, "params": list(params)})
    # Arguments a class insists on are among its hyper-parameters; each group then has its own.
    accepted = inspect.signature(kind).parameters
    arguments = {name: value for name, value in groups[0].items() if name in accepted and name != "params"}
    try:
        return cast(Any, kind)(groups, **arguments)  # type: ignore[no-any-return]
    except (TypeError, ValueError) as error:
        raise BadInput(f"{spec['class']} cannot be built from {arguments}: {error}") from error


def put_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Any]) -> None:
    """The optimizer's state of one parameter, from elsewhere: on the parameter's device, as torch itself has it."""
    group = next(g for g in optimizer.param_groups if any(p is parameter for p in g["params"]))
    moves_step = group.get("fused") or group.get("capturable")
    optimizer.state[parameter] = {
        name: value.to(parameter.device) if isinstance(value, Tensor) and (name != "step" or moves_step) else value
        for name, value in state.items()
    }


def is_numeric(value: Any) -> bool:
    """A finite number, a bool, None, or a tuple of these: a setting that servers follow while a mode lasts."""
    if isinstance(value, tuple):
        return all(not isinstance(v, tuple) and is_numeric(v) for v in value)
    if isinstance(value, int):  # a bool, too
        return -(2**63) <= value < 2**63
    return value is None or (isinstance(value, float) and math.isfinite(value))


def user_class(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    """The class the user chose, also after DistributedOptimizer has put its own in front."""
    kind: type[torch.optim.Optimizer] = getattr(optimizer, "user_class", type(optimizer))
    return kind


def resolve(name: str) -> type[torch.optim.Optimizer]:
    """The class called `module:Class`; a name alone is one of `torch.optim`.

    Raises BadInput, with what was probably meant, when there is none or it cannot be used.
    """
    module_name, _, qualname = name.rpartition(":")
    if not module_name or module_name.split(".")[:2] == ["torch", "optim"]:
        module, module_name = torch.optim, "torch.optim"
    elif module_name == "__main__":
        raise BadInput(f"optimizer {name}: the script itself cannot be imported here; move the class to a module")
    else:
        module = module_of("optimizer", name, module_name)
    found: Any = module
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if not (
        isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and found is not torch.optim.Optimizer
    ):
        known = [n for n, k in vars(module).items() if isinstance(k, type) and issubclass(k, torch.optim.Optimizer)]
        known = sorted(set(known) - {"Optimizer", "LBFGS", "SparseAdam"})
        by_lower = {n.lower(): n for n in known}
        near = get_close_matches(qualname.lower(), by_lower, n=1, cutoff=0.5)
        hint = f"did you mean {by_lower[near[0]]}?" if near else f"it has {', '.join(known) or 'none'}"
        raise BadInput(f"{module_name} has no optimizer {qualname!r}: {hint}")
    _check_usable(found)
    return found


def _check_usable(kind: type[torch.optim.Optimizer]) -> None:
    if issubclass(kind, torch.optim.SparseAdam):
        raise BadInput("SparseAdam takes sparse gradients only; dense gradients come here: use Adam")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if issubclass(kind, torch.optim.LBFGS) or (closure is not None and closure.default is inspect.Parameter.empty):
        raise BadInput(
            f"{kind.__name__} needs a closure and cannot accumulate micro-batches: "
            "use SGD, Adagrad, Adam or another one-pass optimizer"
        )


def _to_plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, tuple):  # JSON would make a list of it
        return {"tuple": [_to_plain(v, place) for v in value]}
    if isinstance(value, list):
        return [_to_plain(v, place) for v in value]
    hint = f": give the number, {float(value)}" if isinstance(value, Tensor) and value.numel() == 1 else ""
    raise BadInput(f"{place} is a {type(value).__name__}, expected a number, string, list or tuple{hint}")


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(_from_plain(v) for v in value["tuple"])
    return [_from_plain(v) for v in value] if isinstance(value, list) else value
