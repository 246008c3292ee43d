"""Whether the ids of a dataset mean what they meant in the data that the rows were trained with.

Decided here: which vocabularies fit those that a job has trained. Sizes of tables, and ids that are hashes or numbers
of the input, which mean the same in any data, are no part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gba_hvd.errors import StateMismatch

Digests = dict[str, tuple[int, str]]
"""By table: the number of values of its vocabulary, and a digest of them in the order of their ids."""


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


def other_vocabulary(trained: Mapping[str, tuple[int, str]], found: Vocabularies) -> str:
    """In words, the first vocabulary in which ids mean other values than were trained; else empty.

    One that only has more values at its end fits.
    """
    for table, (n, digest) in found.digests.items():
        n_trained, expected = trained.get(table, (n, digest))
        if (n, digest) == (n_trained, expected) or (n > n_trained and found.digest_of(table, n_trained) == expected):
            continue
        return (
            f"table {table!r}: expected the vocabulary that was trained, {n_trained:,} values with digest {expected}, "
            f"got {n:,} values with digest {digest}, in {found.name}: its ids stand for other values"
        )
    return ""


def refuse_other_vocabularies(trained: Mapping[str, tuple[int, str]], dataset: object) -> None:
    """Raises StateMismatch where ids of the dataset mean other values than were trained."""
    found: Vocabularies | None = getattr(dataset, "vocabulary_digests", None)
    if found is not None and (words := other_vocabulary(trained, found)):
        raise StateMismatch(
            f"{words}, which would get their rows. Prepare the log with the vocabularies of the store that was "
            "trained (gba-hvd data prepare ... --like STORE), or train a new model, at another url or with resume=False"
        )
