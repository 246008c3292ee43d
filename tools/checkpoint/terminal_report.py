"""What a person sees of `gba-hvd checkpoint`: tables, sizes and ages in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from recovery.catalog.best_step import ahead_words
from recovery.catalog.epoch_position import POSITION
from recovery.units import size

from ..terminal import print_line, print_table


def print_list(url: str, listed: Sequence[Mapping[str, Any]], unsaved: str = "") -> None:
    """One line for each checkpoint, newest first; what is wrong with the damaged ones below.

    unsaved: in words, the best model, where no checkpoint has it
    """
    if not listed:
        print_line(f"{url}: no checkpoints")
        return
    rows = [
        (
            short(one["name"]),
            one.get("kind", "-"),
            _count(one.get("step")),
            (one.get("position") or {}).get("words", "-"),
            _count(one.get("samples")),
            _size(one.get("n_bytes")),
            _age(one.get("age_s")),
            _count(one.get("chain")),
            "ok" + _best(one, unsaved) if one["ok"] else "DAMAGED",
        )
        for one in listed
    ]
    print_table(("name", "kind", "step", "position", "samples", "bytes", "age", "chain", ""), rows, left=(0, 1, 3, 8))
    for one in listed:
        if not one["ok"]:
            print_line(one["why"])
    if unsaved:
        print_line(unsaved)


def _best(one: Mapping[str, Any], unsaved: str) -> str:
    if "best" not in one:
        return ""
    ahead = ahead_words(one["best_ahead"])
    return f", the best model{' that is saved' * bool(unsaved)}: {one['best']}" + f" ({ahead})" * bool(ahead)


def print_one(shown: Mapping[str, Any]) -> None:
    """What `show` says."""
    print_line(f"{shown['name']}: {shown['kind']}, step {shown['step']:,}, {shown['samples']:,} samples")
    print_line(f"  saved     {_age(shown['age_s'])} ago, {_size(shown['n_bytes'])}, blobs: {shown['blobs']}")
    print_line(f"  chain     {', '.join(short(name) for name in shown['chain'])} ({_size(shown['chain_bytes'])})")
    print_line(f"  state     {_size(shown['state_bytes'])}; rows in {shown['n_shards']} shards")
    about = dict(shown["about"])
    if shown["position"] is not None:
        about[POSITION] = shown["position"]["words"]
    for key, value in about.items():
        print_line(f"  {key:9} {_words(value)}")
    rows = [
        (
            t["name"],
            _count(t["n_rows"]),
            _count(t["ids"]),
            t["columns"],
            _count(t["saved"]),
            _size(t["n_bytes"]),
            t["steps"],
        )
        for t in shown["tables"]
    ]
    print_table(("table", "rows", "ids", "columns", "saved here", "bytes", "of steps"), rows, left=(0, 3))
    if large := [t["name"] for t in shown["tables"] if t["hashed"] and t["ids"] is None]:
        print_line(f"not counted: the ids of {', '.join(large)}, whose rows are large: --ids reads them")


def print_diff(found: Mapping[str, Any]) -> None:
    print_line(
        f"{short(found['from'])} (step {found['from_step']:,}) to {short(found['to'])} (step {found['to_step']:,})"
    )
    rows = [
        (
            one["table"],
            _count(one["n_rows"]),
            _count(one["changed"]),
            f"{one['changed'] / one['n_rows']:.2%}",
            "-" if one["largest"] is None else f"{one['largest']:.6g} (row {one['largest_row']:,})",
            _count(one["only_one"]),
            _count(one["ids_came"]),
            _count(one["ids_left"]),
        )
        for one in found["tables"]
    ]
    headings = (
        "table",
        "rows",
        "changed",
        "share",
        "largest change of a weight",
        "in one only",
        "ids came",
        "ids left",
    )
    print_table(headings, rows, left=(0,))


def print_rollback(found: Mapping[str, Any]) -> None:
    for one in found["deleted"]:
        print_line(f"{short(one['name'])}  step {_count(one['step'])}")
    n, step = len(found["deleted"]), f"{found['step']:,}"
    these = f"{n} later checkpoint{'s' if n > 1 else ''}"
    if found["newest"] is None:
        print_line(f"{these}, to be deleted; {short(found['to'])} (step {step}) becomes the newest: add --yes to do it")
        return
    print_line(
        f"{these} deleted. {short(found['to'])} is the newest now, as {short(found['newest'])}: the next launch "
        f"resumes from step {step}, also where a host still has later training in memory. Saved models stay "
        "(`gba-hvd model rollback` withdraws versions of one)"
    )


def print_deletion(found: Mapping[str, Any]) -> None:
    n, n_objects = len(found["checkpoints"]), found["objects"]
    what = f"{found['url']}: {n} checkpoint{'s' * (n != 1)}, {n_objects:,} objects, {found['n_bytes']:,} bytes"
    if not n and not n_objects:
        print_line(f"{found['url']}: no checkpoints")
    elif found["deleted"]:
        print_line(f"{what} deleted. Saved models stay")
    else:
        print_line(f"{what}, to be deleted: add --yes to do it")


def short(name: str) -> str:
    return name.removeprefix("manifests/").removesuffix(".json")


def _words(value: Any) -> str:
    if not isinstance(value, Mapping):
        return str(value)
    known = {key: one for key, one in value.items() if one is not None}
    return ", ".join(f"{key} {one:.4g}" if isinstance(one, float) else f"{key} {one}" for key, one in known.items())


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _size(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else size(n_bytes)


def _age(age_s: float | None) -> str:
    """Clocks may have been set back: then it is of now."""
    if age_s is None:
        return "-"
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= 2 * length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"
