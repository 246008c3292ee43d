"""Whether the ids of a dataset mean what they meant in the data that the rows were trained with.

Decided here: which vocabularies fit those that a job has trained. Sizes of tables, and ids that are hashes or numbers
of the input, which mean the same in any data, are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gba_hvd.errors import StateMismatch

Digests = dict[str, tuple[int, str]]
"""Of a dataset, by table: the number of values of its vocabulary, and a digest of them in the order of their ids."""

Trained = dict[str, dict[int, str]]
"""Of a job, by table: the digests of vocabularies that were trained, by their number of values; the newest is last."""

_KEPT = 32  # digests of a table: one that grows every night has a month of them


class Vocabularies(Protocol):
    """What a dataset has as `vocabulary_digests`, where its ids are positions in vocabularies. name: of the dataset."""

    name: str

    @property
    def digests(self) -> Mapping[str, tuple[int, str]]: ...

    def digest_of(self, table: str, n_values: int) -> str:
        """Of the first values of a table."""


def digests_of(dataset: object) -> Digests:
    """Empty for a dataset without vocabularies."""
    found: Vocabularies | None = getattr(dataset, "vocabulary_digests", None)
    return {} if found is None else dict(sorted(found.digests.items()))


def with_digests(trained: Mapping[str, Mapping[int, str]], found: Mapping[str, tuple[int, str]]) -> Trained:
    """Those that are trained, once `found` is."""
    added = {table: dict(sizes) for table, sizes in trained.items()}
    for table, (n, digest) in found.items():
        sizes = added.setdefault(table, {})
        sizes.pop(n, None)
        sizes[n] = digest
        added[table] = dict(list(sizes.items())[-_KEPT:])
    return added


def to_state(trained: Mapping[str, Mapping[int, str]]) -> dict[str, Any]:
    return {table: [[n, digest] for n, digest in sizes.items()] for table, sizes in trained.items()}


def of_state(stored: Mapping[str, Any]) -> Trained:
    """An earlier version stored one number and digest of a table."""
    return {table: dict([one] if isinstance(one[0], int) else one) for table, one in stored.items()}


def other_vocabulary(trained: Mapping[str, Mapping[int, str]], found: Vocabularies) -> str:
    """In words, the first vocabulary in which ids are known to mean other values than were trained; else empty.

    One that only has more values at its end fits.
    """
    for table, (n, digest) in found.digests.items():
        sizes = trained.get(table, {})
        n_trained = max((one for one in sizes if one <= n), default=None)
        if n_trained is None or sizes[n_trained] == (digest if n_trained == n else found.digest_of(table, n_trained)):
            continue
        expected = f"the vocabulary that was trained, {n_trained:,} values with digest {sizes[n_trained]}"
        return (
            f"table {table!r}: expected {expected}, got {n:,} values with digest {digest}, in {found.name}: its ids "
            "stand for other values"
        )
    return ""


def not_compared(trained: Mapping[str, Mapping[int, str]], found: Vocabularies) -> str:
    """In words, the first vocabulary that may be the beginning of one that was trained, which no digest shows; else
    empty."""
    for table, (n, _) in found.digests.items():
        sizes = trained.get(table, {})
        if sizes and n < max(sizes) and n not in sizes:
            return (
                f"table {table!r}: {found.name} has {n:,} values in its vocabulary, fewer than the {max(sizes):,} that "
                "were trained. Whether they are the first of these cannot be compared: if it was not prepared from the "
                "same data, or --like the store that was trained, its ids stand for other values"
            )
    return ""


def refuse_other_vocabularies(trained: Mapping[str, Mapping[int, str]], dataset: object) -> str:
    """Raises StateMismatch where ids of the dataset mean other values than were trained; returns `not_compared`."""
    found: Vocabularies | None = getattr(dataset, "vocabulary_digests", None)
    if found is None:
        return ""
    if words := other_vocabulary(trained, found):
        raise StateMismatch(
            f"{words}, which would get their rows. Prepare the log with the vocabularies of the store that was "
            "trained (gba-hvd data prepare ... --like STORE), or train a new model, at another url or with "
            "resume=False. If its ids are those of other tables, or no ids of this vocabulary, "
            "`log.vocabulary_digests = None` leaves the comparison out"
        )
    return not_compared(trained, found)
