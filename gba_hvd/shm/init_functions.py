"""Users' functions that compute initial rows: what they return is checked, and a server finds those of hashed tables.

Ids of a hashed table are admitted in training, in asynchronous modes by servers: processes in which no script of the
user's runs. So such a function goes by its name, `module:function`, and both import it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from gba_hvd.errors import BadInput
from gba_hvd.extras import module_of

InitFunction = Callable[[np.ndarray], Any]


def name_of(function: InitFunction) -> str:
    """`module:function`; empty for what other processes cannot import by such a name."""
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module is None or module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        return ""
    return f"{module}:{name}"


def resolve(name: str) -> InitFunction:
    """The function that `name_of` has named. Raises BadInput."""
    module_name, _, function_name = name.partition(":")
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise BadInput(f"{name} belongs to Python, it is no init function of a table")
    found = getattr(module_of("init function", name, module_name), function_name, None)
    if not callable(found):
        raise BadInput(f"init function {name}: module {module_name!r} has none of this name on this host")
    function: InitFunction = found
    return function


def initial_values(function: InitFunction, what: str, ids: np.ndarray, dim: int) -> np.ndarray:
    """float32 [n, dim], the initial rows of ids, int64 [n]. what: the function is called in messages.

    Raises BadInput for anything else that it returns.
    """
    return checked_values(what, function(ids.copy()), len(ids), dim)


def checked_values(what: str, values: Any, n: int, dim: int) -> np.ndarray:
    """float32 [n, dim], a copy."""
    found = copied(values)
    if found.shape != (n, dim) or found.dtype.kind != "f":
        raise BadInput(f"{what}: expected float32 [{n}, {dim}], got {found.dtype} {list(found.shape)}")
    found = found.astype(np.float32, copy=False)
    if not np.isfinite(found).all():
        raise BadInput(f"{what}: some values are not finite, or too large for float32")
    return np.ascontiguousarray(found)


def copied(values: Any) -> np.ndarray:
    """Of an array or a tensor. numpy knows no bfloat16, and warns of tensors."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = (values.float() if values.is_floating_point() else values).numpy()
    return np.array(values)
