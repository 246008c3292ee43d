"""Settings from environment variables, for the dataclasses that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from recovery.errors import BadInput


def settings_from(
    environ: Mapping[str, str], kind: type[Any], prefix: str, former: Mapping[str, str]
) -> dict[str, Any]:
    """By field of a dataclass, what PREFIX_<NAME> says; fields without a variable are left out.

    former: by field, another variable that is still read. Raises BadInput for a text that is no value of the field.
    """
    values: dict[str, Any] = {}
    for field in fields(kind):
        variables = [prefix + name for name in (field.name.upper(), former.get(field.name)) if name]
        variable = next((one for one in variables if one in environ), None)
        if variable is None:
            continue
        try:
            values[field.name] = _PARSE[str(field.type)](environ[variable])
        except ValueError as error:
            raise BadInput(f"{variable}={environ[variable]!r}: {error}") from None
    return values


def _truth(text: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    if text.lower() not in known:
        raise ValueError(f"expected one of {', '.join(known)}")
    return known[text.lower()]


_PARSE: dict[str, Callable[[str], Any]] = {
    "str": str,
    "str | None": str,
    "int": int,
    "float": float,
    "bool": _truth,
    "int | None": int,
    "float | None": float,
    "Path": Path,
}
