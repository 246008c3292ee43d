"""How the lists of files or shards of several workers differ, in words: for the error that ends their job."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 5  # names of each kind that are written out


def differing(lists: Sequence[Sequence[str]]) -> str:
    """lists: of all ranks. What they differ in from the longest of them; "" where all are equal."""
    full = max(range(len(lists)), key=lambda rank: len(lists[rank]))
    parts = []
    for rank, names in enumerate(lists):
        if rank != full and (found := _against(lists[full], names)):
            parts.append(f"{len(names)} on rank {rank}, {found}")
    return f"{len(lists[full])} on rank {full}; " + "; ".join(parts) if parts else ""


def _against(full: Sequence[str], names: Sequence[str]) -> str:
    if list(full) == list(names):
        return ""
    theirs, mine = set(full), set(names)
    missing, added = [one for one in full if one not in mine], [one for one in names if one not in theirs]
    if not missing and not added:
        return "the same in another order: sort them, glob() does not"
    found = [f"missing: {_some(missing)}"] if missing else []
    return "; ".join([*found, *([f"only there: {_some(added)}"] if added else [])])


def _some(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more:,} more" if more > 0 else "")
