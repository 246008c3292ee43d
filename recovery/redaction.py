"""Texts without the credentials that are in the URLs they quote: for everything that is shown, stored or logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_USER = re.compile(r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]*://)[^\s'\"<>/?#]*@")
_PARAMETER = re.compile(
    r"(?P<name>[?&;](?:[A-Za-z0-9_.-]*(?:password|passwd|secret|token|signature|credential|access_?key|api_?key)"
    r"[A-Za-z0-9_.-]*|sig|pwd))=[^&;\s'\"<>#]*",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:password|passwd|secret|token|credentials?)$|connection_?string$|(?:account|access|api|secret)_?key$",
    re.IGNORECASE,
)
_ALL_SECRET = "storage_options"
HIDDEN = "***"


def redacted(text: str) -> str:
    """`text` with user and password of every URL in it hidden, and query parameters that are called like secrets."""
    return _PARAMETER.sub(rf"\g<name>={HIDDEN}", _USER.sub(rf"\g<scheme>{HIDDEN}@", text))


def redacted_values(value: Any) -> Any:
    """Plain JSON values with every text redacted, and what is stored under a name such as `secret` hidden."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN if one and _is_secret(str(key), one) else redacted_values(one) for key, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted_values(one) for one in value]
    return value


def _is_secret(name: str, value: Any) -> bool:
    return name == _ALL_SECRET or (isinstance(value, str) and _SECRET_NAME.search(name) is not None)
