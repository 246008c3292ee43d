"""How much was done in the last seconds, for `gba-hvd status`: a mean over all micro-batches hides one that stands."""

from __future__ import annotations

from collections import deque

PACE_S = 10.0
_PARTS = 10


class RecentPace:
    """Sums of what was done, by part of the last `PACE_S`. now_s: of one clock, which never goes back."""

    def __init__(self, now_s: float) -> None:
        self._since_s = now_s
        self._parts: deque[tuple[int, float]] = deque(maxlen=_PARTS)  # (number of the part, done in it)
        self.last_s: float | None = None  # when something was done

    def add(self, now_s: float, n: float = 1) -> None:
        part = int(now_s / PACE_S * _PARTS)
        if self._parts and self._parts[-1][0] == part:
            n += self._parts.pop()[1]
        self._parts.append((part, n))
        self.last_s = now_s

    def per_s(self, now_s: float) -> float:
        """Done per second of the last `PACE_S`, or since the beginning, if that is later."""
        begin_s = max(self._since_s, now_s - PACE_S)
        done = sum(n for part, n in self._parts if (part + 1) * PACE_S / _PARTS > begin_s)
        return done / max(now_s - begin_s, PACE_S / _PARTS)
