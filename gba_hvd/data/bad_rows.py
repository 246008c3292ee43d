"""Malformed rows: counted, the first few stored for the report, and past a limit the end of the work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from gba_hvd.errors import BadInput

DEFAULT_LIMIT = 0.001
# A share is taken of at least that many rows while reading: one bad row at the very start must not stop a long input.
_ROWS_TO_CHECK = 100_000
_KEPT = 5  # of the malformed rows, for the message


@dataclass(frozen=True)
class BadRow:
    file: str
    where: str  # "line 17" of a text file, "row 17" of a Parquet file, both from 1
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.reason}"


class BadRows:
    """Counts malformed rows. `limit` below 1 is a share of the rows read, from 1 up a number of rows; 0 allows none."""

    def __init__(self, limit: float = DEFAULT_LIMIT) -> None:
        if not 0 <= limit < math.inf:
            raise BadInput(f"the limit of bad rows is {limit}, expected 0, a share below 1, or a number of rows")
        self._limit = limit
        self.count = 0
        self.rows_read = 0
        self.first: list[BadRow] = []

    def report(self, file: str, where: str, reason: str) -> None:
        self.count += 1
        if len(self.first) < _KEPT:
            self.first.append(BadRow(file, where, reason))

    def allowed(self, rows: int) -> int:
        return int(self._limit if self._limit >= 1 else self._limit * rows)

    def check(self, *, at_end: bool = False) -> None:
        """Raise `BadInput` when there are more than allowed."""
        rows = self.rows_read if at_end else max(self.rows_read, _ROWS_TO_CHECK)
        if self.count <= self.allowed(rows):
            return
        shown = "\n".join(f"  {row}" for row in self.first)
        more = f"\n  and {self.count - len(self.first)} more" if self.count > len(self.first) else ""
        limit = f"{self._limit:g}" if self._limit >= 1 or self._limit == 0 else f"{self._limit:.3%} of the rows"
        raise BadInput(
            f"{self.count} malformed rows among {self.rows_read} read, the limit is {limit}; "
            f"mend the input or raise --max-bad-rows. The first:\n{shown}{more}"
        )

    def to_json(self) -> dict[str, Any]:
        return {"count": self.count, "rows_read": self.rows_read, "first": [str(row) for row in self.first]}
