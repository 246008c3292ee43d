"""Whether MLflow takes what is sent, and since when not: by how far the spool has been delivered.

The sender knows of trouble when a request has failed, which takes long where a server does not answer; that nothing is
taken meanwhile is known here. No file, no MLflow.
"""

from __future__ import annotations

from dataclasses import dataclass

_SILENT_S = 20.0


@dataclass(frozen=True)
class Outage:
    since_unix_s: float
    until_unix_s: float


class Reach:
    """Of one spool, looked at every few seconds. over: outages that have ended; since_unix_s: of one that has not."""

    def __init__(self) -> None:
        self.over: list[Outage] = []
        self.since_unix_s: float | None = None
        self._offset = -1
        self._waits_since: float | None = None  # records, without that any was taken

    def look(self, problem: str | None, offset: int, n_bytes: int, has_run: bool, now_unix_s: float) -> str | None:
        """Why nothing gets through; None: it does.

        problem: the sender's own. offset: bytes of the spool that were delivered, of `n_bytes`; has_run: some were
        """
        if offset != self._offset or offset >= n_bytes or not has_run:
            self._offset, self._waits_since = offset, None
        elif self._waits_since is None:
            self._waits_since = now_unix_s
        waits_since = self._waits_since
        if problem is None and waits_since is not None and now_unix_s - waits_since >= _SILENT_S:
            problem = f"MLflow has taken nothing for {_SILENT_S:.0f} s"
        if problem is not None and self.since_unix_s is None:
            self.since_unix_s = now_unix_s if waits_since is None else waits_since
        elif problem is None and self.since_unix_s is not None:
            self.over.append(Outage(self.since_unix_s, now_unix_s))
            self.since_unix_s = None
        return problem
