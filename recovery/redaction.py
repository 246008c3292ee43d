"""What is shown, stored or logged, without credentials: one decision for all texts, settings and command lines.

By name, and in URLs. A name is split into words (`dbPassword`, `db_password`): some words are secret wherever they
stand (`_STRONG`), others where they are the last one and the value is neither a number nor a switch (`_WEAK`: a `token`
is hidden, `n_tokens=512` is not); within a text, only if it looks like a key, for a table may be called `token`. A name
that ends otherwise (`password_file`, `token_dim`) is that of something else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

HIDDEN = "***"
_USER = re.compile(
    r"(?P<scheme>\b[A-Za-z][A-Za-z0-9+.-]{0,31}://)(?:[^\s'\"<>/?#]*@"
    # a password with characters that a URL would escape; not the port of a host
    r"|[^\s'\"<>/?#:@\[]+:(?!\d+(?:[^\w%+-]|$))(?:(?!://)[^\s<>])*@)"
)
_PARAMETER = re.compile(
    r"(?P<name>[?&;](?:[A-Za-z0-9_.-]*(?:password|passwd|secret|token|signature|credential|access_?key|api_?key)"
    r"[A-Za-z0-9_.-]*|sig|pwd))=[^&;\s'\"<>#]*",
    re.IGNORECASE,
)
_NAME = re.compile(
    r"(?<![\w./-])(?P<dashes>-*)(?P<name>\w[\w.-]*+)(?:(?P<is>\\*['\"]?\s*(?:=>|==?|:(?!//))\s*)|(?P<gap>\s+)(?!-))"
)
_VALUE = re.compile(
    r"(?P<quote>\\*['\"])(?P<quoted>(?:(?!(?P=quote))(?:\\.|[^\\]))*)(?P=quote)|(?:(?:bearer|basic|token)\s+)?[^\s;<>,)\]}{(\[][^\s;<>,)\]}]*",
    re.IGNORECASE,
)
_KEY = re.compile(r"(?=[\w.~+=-]*\d)(?=[\w.~+=-]*[A-Za-z])[\w.~+=-]{12,}")  # as weak names have in texts
_BEARER = re.compile(r"\b(?P<name>bearer\s+)(?=\S*[\d._-])[\w.~+/=-]{8,}", re.IGNORECASE)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_STRONG = re.compile(r"\w*(?:password|passwd|passphrase|passcode)s?|pwd|secrets?|credentials?|\w+credentials?")
_STRONG_KEY = re.compile(r"(?:\w+_)?(?:api|access|account|secret|private|encryption|signing|shared|hvd)_?keys?")
_WEAK = frozenset({"pass", "pw", "auth", "authorization", "bearer", "token", "tokens", "accesstoken", "authtoken",
                   "sas", "sig", "signature", "cookie"})  # fmt: skip
_OF_LANGUAGE = frozenset({"pad", "eos", "bos", "unk", "cls", "sep", "mask", "special", "stop", "start", "end", "oov"})
_ABOUT = frozenset({"file", "path", "dir", "folder", "name", "length", "len", "dim", "size", "type", "policy", "count",
                    "env", "url", "provider", "class", "id"})  # fmt: skip
_SWITCH = frozenset({"", "true", "false", "none", "null"})
_ALL_SECRET = "storage_options"


def redacted(text: str) -> str:
    """`text` with user and password of every URL in it hidden, and what follows a secret's name and `=`, `:`, or as
    an option a space.
    """
    text = _PARAMETER.sub(rf"\g<name>={HIDDEN}", _USER.sub(rf"\g<scheme>{HIDDEN}@", text))
    parts, at = [], 0
    while (named := _NAME.search(text, at)) is not None:
        end = named.end() if named["is"] else named.end("name")
        parts.append(text[at:end])
        at = end
        if not (named["is"] or named["dashes"]) or not is_secret(named["name"], "a text"):
            continue
        if (value := _VALUE.match(text, named.end())) and _hides(named, value):
            quote = value["quote"] or ""
            tail = "" if quote else value[0][len(value[0].rstrip(")]},.'\"\\")) :]
            parts.append(f"{text[at : named.end()]}{quote}{HIDDEN}{quote}{tail}")
            at = value.end()
    return _BEARER.sub(rf"\g<name>{HIDDEN}", "".join([*parts, text[at:]]))


def redacted_values(value: Any) -> Any:
    """Plain JSON values with every text redacted, and what is stored under a name such as `secret` hidden."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(str(key), one) else redacted_values(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return redacted_command(value) if all(isinstance(one, str) for one in value) else [*map(redacted_values, value)]
    return value


def redacted_command(argv: Sequence[str]) -> list[str]:
    """The arguments of a command; hidden is also what follows an option such as `--password`."""
    before = ["", *argv]
    return [
        HIDDEN
        if last.startswith("-") and not one.startswith("--") and is_secret(last.lstrip("-"), one)
        else redacted(one)
        for last, one in zip(before, argv, strict=False)
    ]


def is_secret(name: str, value: Any) -> bool:
    """Whether `value`, anything that JSON has or a text of it, is a secret where it is called `name`: dots separate the
    names of nested settings.
    """
    parts = name.split(".")
    if name == _ALL_SECRET and value:
        return True
    return any(_is_secret(part, value) for part in parts)


def _is_secret(name: str, value: Any) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _is_switch(value) or words[-1] in _ABOUT:
        return False
    joined = "_".join(words)
    if words == ["pwd"] and isinstance(value, str) and value.strip("'\"").startswith(("/", "~")):
        return False  # the working directory
    is_text = not isinstance(value, int | float)
    if _STRONG_KEY.fullmatch(joined) or _STRONG.fullmatch(words[-1]) or joined.endswith("connection_string"):
        return is_text or not joined.endswith("s")  # else a count
    if is_text and any(_STRONG.fullmatch(word) for word in words) and not _is_number(value):
        return True
    if words[-1] in _WEAK and not (len(words) > 1 and words[-2] in _OF_LANGUAGE):
        return not isinstance(value, Mapping) and not _is_number(value)
    return False


def _is_switch(value: Any) -> bool:
    """Also of a text: settings become texts before they reach MLflow."""
    if isinstance(value, str):
        return value.strip("'\"").lower() in _SWITCH
    return value is None or isinstance(value, bool) or (isinstance(value, Mapping | list | tuple) and not value)


def _is_number(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_number, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    if isinstance(value, str):
        return re.fullmatch(r"[-+]?[\d_,.]+(?:e[-+]?\d+)?", value.strip("'\"[]() "), re.IGNORECASE) is not None
    return _is_switch(value) or isinstance(value, int | float)


def _hides(named: re.Match[str], value: re.Match[str]) -> bool:
    bare = value["quoted"] if value["quote"] else value[0]
    if bare.startswith(HIDDEN) or not is_secret(named["name"], bare):
        return False
    if not is_secret(named["name"], {"its": "own"}) and not named["dashes"]:  # a weak name, in a sentence
        return _KEY.fullmatch(bare) is not None
    is_sentence = re.match(r" [a-z]", value.string[value.end() :]) is not None and bare.isalpha()
    return not (is_sentence and (named["is"] or "").endswith(": "))
