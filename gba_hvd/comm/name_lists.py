"""How the lists of files or shards of several workers differ, in words: for the error that ends their job."""

from __future__ import annotations

from collections.abc import Sequence

_NAMED = 5  # names of each kind that are written out


def differing(lists: Sequence[Sequence[str]], ranks: Sequence[int] | None = None) -> str:
    """What they differ in from the longest of them; "" where all are equal. ranks: whose they are; None: of all"""
    of = range(len(lists)) if ranks is None else ranks
    full = max(range(len(lists)), key=lambda at: len(lists[at]))
    parts = []
    for at, names in enumerate(lists):
        if at != full and (found := _against(lists[full], names)):
            parts.append(f"{len(names)} on rank {of[at]}, {found}")
    return f"{len(lists[full])} on rank {of[full]}; " + "; ".join(parts) if parts else ""


def refusal(differences: str) -> str:
    """differences: as of `differing`"""
    return (
        f"the workers disagree about the files or shards of the dataset: {differences}. All need the same list in "
        "the same order: put back what is missing, and start the same command again"
    )


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
