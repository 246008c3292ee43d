"""Names of the files or shards that workers read, where one of them was refused for other samples than the others have.

Nothing is sent before that. No socket here: the answers to heartbeats ask the workers for their lists.
"""

from __future__ import annotations

from gba_hvd.ps.messages import Sources


class SourceLists:
    """Belongs to the server's main thread.

    wanted: grows with each worker that asks what differs; who has sent its list for a smaller number sends it again
    """

    def __init__(self) -> None:
        self.wanted = 0
        self._asking = set[int]()
        self._lists: dict[int, bytes] = {}  # by worker

    def add(self, request: Sources, names: bytes) -> tuple[int, bytes] | None:
        """A worker's list. For one that asks: another worker, and its list, which differs; None: there is none yet."""
        if request.asks and request.worker not in self._asking:
            self._asking.add(request.worker)
            self._lists.clear()  # of an epoch before
            self.wanted += 1
        self._lists[request.worker] = names
        if not request.asks:
            return None
        return next(((worker, theirs) for worker, theirs in self._lists.items() if theirs != names), None)
