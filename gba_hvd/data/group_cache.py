"""Decoded groups of samples: each decoded once while it is kept, and ahead of its first sample where that is known.

A reader announces the blocks of groups it is at, one for each lane (`row_group_order`). What is announced is kept and
decoded in a thread beside; of all else the groups used last are kept.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gba_hvd.reading.datasets import Block

_UNANNOUNCED = 8  # groups that are kept where none are announced
_FORGET_AFTER = 8  # a lane that was not announced while all others were so often is read by another process now

_Group = TypeVar("_Group")


class _Entry(Generic[_Group]):
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.group: _Group | None = None


class GroupCache(Generic[_Group]):
    """Groups by number. Safe in several threads.

    decode: makes a group of its number; called in any thread, for one group by one thread at a time
    limit: groups that are kept; None: what was announced lately for each lane, and one more; or else 8
    """

    def __init__(self, decode: Callable[[int], _Group], limit: int | None = None) -> None:
        self._decode, self._limit = decode, limit
        self._lock = threading.Lock()
        self._kept: OrderedDict[int, _Entry[_Group]] = OrderedDict()  # last used last
        self._lanes: dict[int, tuple[int, frozenset[int]]] = {}  # when it was announced last, and its groups
        self._turn = 0
        self._coming: deque[int] = deque()
        self._thread: threading.Thread | None = None

    def get(self, number: int) -> _Group:
        """Decoded; waits for it. Raises what decoding raises."""
        with self._lock:
            entry = self._kept.setdefault(number, _Entry())
            self._kept.move_to_end(number)
            self._evict()
        return self._in(entry, number)

    def _in(self, entry: _Entry[_Group], number: int) -> _Group:
        with entry.lock:
            if entry.group is None:
                entry.group = self._decode(number)
            return entry.group

    def announce(self, now: Block, after: Block | None) -> None:
        """These are read now, and those of the same lane after them: decode what is not there yet.

        A lane below 0 is kept until it is announced again.
        """
        following = () if after is None else after.groups
        with self._lock:
            self._turn += 1
            self._lanes[now.lane] = (self._turn, frozenset((*now.groups, *following)))
            oldest = self._turn - _FORGET_AFTER * len(self._lanes)
            self._lanes = {lane: found for lane, found in self._lanes.items() if lane < 0 or found[0] >= oldest}
            # From the end: the thread that reads begins with the first.
            missing = [one for one in (*reversed(now.groups), *following) if one not in self._kept]
            self._coming.extend(one for one in missing if one not in self._coming)
            if self._coming and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gba-hvd groups", daemon=True)
                self._thread.start()

    def release(self) -> None:
        """The lanes from 0 on are not read any more."""
        with self._lock:
            self._lanes = {lane: found for lane, found in self._lanes.items() if lane < 0}
            self._evict()

    def close(self) -> None:
        """Decode no further ahead; waits for the group that is being decoded. No lane is read any more.

        May be repeated.
        """
        with self._lock:
            self._coming.clear()
            self._lanes.clear()
            self._evict()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _announced(self) -> frozenset[int]:
        return frozenset[int]().union(*(groups for _, groups in self._lanes.values()))

    def _evict(self) -> None:
        if not self._kept:
            return
        announced, limit, newest = self._announced(), self._limit, next(reversed(self._kept))
        if limit is None:
            limit = len(announced) + 1 if announced else _UNANNOUNCED
        while len(self._kept) > limit:
            others = (number for number in self._kept if number not in announced)
            number = next(others, next(iter(self._kept)))
            if number == newest:  # the others are announced: the one used longest ago gives way
                number = next(iter(self._kept))
            del self._kept[number]

    def _run(self) -> None:
        while (found := self._next()) is not None:
            with contextlib.suppress(Exception):  # `get` of this group decodes it again, and raises
                self._in(*found)

    def _next(self) -> tuple[_Entry[_Group], int] | None:
        with self._lock:
            wanted = self._announced()
            while self._coming:
                number = self._coming.popleft()
                if number in wanted and number not in self._kept:
                    entry = self._kept[number] = _Entry()
                    self._evict()
                    return entry, number
            self._thread = None
            return None
