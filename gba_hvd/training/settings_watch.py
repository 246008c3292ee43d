"""Settings of the optimizer's groups, beside the learning rate, that are changed where nothing follows them.

Rows follow the `lr` of the tables' group; all else is the row optimizer's own. Where servers step the dense parameters,
they follow the `lr` of each group, and have the rest as it was when the mode began.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def settings_of(group: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """As plain values, without `lr`. names: of the optimizer's settings; what schedulers keep in a group is none"""
    return {name: _plain(group[name]) for name in names if name in group and name != "lr"}


def own_settings(row_optimizer: Any, names: Collection[str]) -> dict[str, Any]:
    """Those of a row optimizer that the dense optimizer has, too."""
    own = [field.name for field in fields(row_optimizer)] if is_dataclass(row_optimizer) else []
    return {name: _plain(getattr(row_optimizer, name)) for name in own if name in names and name != "lr"}


def changes(asked: Mapping[str, Any], in_use: Mapping[str, Any]) -> str:
    """`betas=(0.85, 0.999) is set and (0.95, 0.999) is used`; empty where what is used is what is set."""
    found = [(name, asked[name], used) for name, used in in_use.items() if asked.get(name, used) != used]
    return ", ".join(f"{name}={now} is set and {used} is used" for name, now, used in found)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
