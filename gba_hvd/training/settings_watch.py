"""Settings of the optimizer's groups, beside the learning rate, that are changed while a job trains.

Rows follow the `lr` of the tables' group; all else is the row optimizer's own. Where servers step the dense parameters,
they follow all settings that are numbers (`torch_optimizers.is_numeric`), unless an update rule has taken over the
optimizer's momentum, and have the rest as it was when the mode began.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from gba_hvd.ps.messages import GroupSetting
from gba_hvd.torch_optimizers import is_numeric

_HOW = ("foreach", "fused", "capturable", "differentiable")  # a step is computed, not what comes of it


def settings_of(group: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """As plain values, without `lr`. names: of the optimizer's settings; what schedulers keep in a group is none"""
    return {name: _plain(group[name]) for name in names if name in group and name != "lr" and name not in _HOW}


def own_settings(row_optimizer: Any, names: Collection[str]) -> dict[str, Any]:
    """Those of a row optimizer that the dense optimizer has, too."""
    own = [field.name for field in fields(row_optimizer)] if is_dataclass(row_optimizer) else []
    return {name: _plain(getattr(row_optimizer, name)) for name in own if name in names and name != "lr"}


def changes(asked: Mapping[str, Any], in_use: Mapping[str, Any]) -> str:
    """`betas=(0.85, 0.999) is set and (0.95, 0.999) is used`; empty where what is used is what is set."""
    found = [(name, asked[name], used) for name, used in in_use.items() if asked.get(name, used) != used]
    return ", ".join(f"{name}={now} is set and {used} is used" for name, now, used in found)


class ChangedSettings:
    """Of each dense group, what was changed since a mode began, in which servers step it.

    begun: as servers have them from the workers. is_followed: servers take changes, of what `is_numeric`

    What was changed once is sent from then on: it may be changed back.
    """

    def __init__(self, begun: Sequence[Mapping[str, Any]], *, is_followed: bool) -> None:
        self._begun, self._is_followed = begun, is_followed
        self._names: list[set[str]] = [set() for _ in begun]

    def followed(self, settings: Sequence[Mapping[str, Any]]) -> list[dict[str, GroupSetting]]:
        """For servers; empty where nothing was changed. settings: of each group, now"""
        if not self._is_followed:
            return []
        found: list[dict[str, GroupSetting]] = []
        for names, begun, now in zip(self._names, self._begun, settings, strict=False):
            names.update(name for name in begun if now.get(name, begun[name]) != begun[name])
            found.append({name: now[name] for name in sorted(names) if name in now and is_numeric(now[name])})
        return found if any(found) else []

    def kept(self, settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What servers have of each group, of what they do not follow."""
        return [
            {k: v for k, v in begun.items() if not self._is_followed or not is_numeric(now.get(k, v))}
            for begun, now in zip(self._begun, settings, strict=False)
        ]


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, tuple | list) else value
