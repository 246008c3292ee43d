"""Options of a `GBACallback` that the modes of a job would not use: which ones, and in which modes they are of use.

Decided here: nothing but that. The callback refuses what no mode that it names would use; what a mode that an operator
requests does not use is reported when it is entered (`mode_limits.options_idle`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gba_hvd.mode_names import BY_NAME, RECORDS, SETTINGS

_OF_AUTO = {"enter_gain", "leave_gain", "patience", "min_stay", "warm_up_steps", "trial_budget"}
_OF_ROUNDS = BY_NAME["shadow"].options - {"sync"}
_USED = {mode.name: mode.options for mode in RECORDS} | {"auto": BY_NAME["gba"].options | _OF_AUTO}
_OF_SERVERS = {"rule", "rule_reason", "rule_settings", "servers_per_host", "wire", "wait_s", "required"}
_OF_A_MODE = set[str]().union(*_USED.values()) | _OF_SERVERS
_NO_TOLERANCE = ("inverse", "none", "gap_aware")


def used_in(mode: str, options: Mapping[str, Any]) -> set[str]:
    """Names of the options that a mode uses; mode: one of `mode_names.SETTINGS`. options: all of them, by name."""
    used = set(_USED[mode])
    if options["staleness"] in _NO_TOLERANCE:
        used.discard("tolerance")
    if mode == "shadow" and options["sync"] == "none":  # no rounds
        used -= _OF_ROUNDS
    if mode == "shadow" and options["sync"] == "bmuf":
        used.add("block_rate")
    return used


def idle_settings(modes: Iterable[str], options: Mapping[str, Any]) -> set[str]:
    """Names of the settings, given or not, that none of these modes uses.

    Modes of replicas use no rule, and report that.
    """
    named = set(modes)
    used = set[str]().union(*(used_in(mode, options) for mode in named))
    return _OF_A_MODE - used - (_OF_SERVERS if named - {"allreduce"} else set())


def idle(modes: Iterable[str], options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """The options with another value than the default that none of these modes uses, each with what would use it."""
    used = set[str]().union(*(used_in(mode, options) for mode in modes))
    given = [name for name, value in options.items() if value != defaults[name] and name not in used]
    return {name: _what_uses(name, options) for name in given}


def _what_uses(name: str, options: Mapping[str, Any]) -> str:
    if name == "tolerance" and options["staleness"] in _NO_TOLERANCE:
        return f"staleness={options['staleness']!r} has no limit in steps; 'threshold' and 'linear' have"
    if name == "block_rate":
        return "it is of mode 'bmuf', and of 'shadow' with sync='bmuf'"
    if options["sync"] == "none" and name in _OF_ROUNDS:
        return "with sync='none' there are no rounds in mode 'shadow'"
    modes = [mode for mode in SETTINGS if name in _USED[mode] and (mode != "auto" or name in _OF_AUTO)]
    return f"it is of mode{'s' * (len(modes) > 1)} {', '.join(map(repr, modes))}"
