"""Decides which decisions of mode "auto" are reported: there is one for each step, mostly the same as before."""

from __future__ import annotations

from gba_hvd.switching.policy import Decision


class DecisionReports:
    """A decision is reported when its mode or the kind of its reason is another one than that of the last report.

    Decisions to stay are reported once they have been alike for `patience` steps: so not each time that a prediction
    comes near its limit.
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self._newest: Decision | None = None
        self._n_alike = 0
        self._reported: tuple[str, str] | None = None

    def add(self, decision: Decision) -> None:
        is_alike = self._newest is not None and _kind(self._newest) == _kind(decision)
        self._newest, self._n_alike = decision, self._n_alike + 1 if is_alike else 1

    def take(self, stays_too: bool) -> Decision | None:
        """What is to be reported now. stays_too: or only a decision to switch."""
        decision = self._newest
        if decision is None or _kind(decision) == self._reported:
            return None
        if not decision.is_switch and not (stays_too and self._n_alike >= self._patience):
            return None
        self._reported = _kind(decision)
        return decision


def _kind(decision: Decision) -> tuple[str, str]:
    return decision.mode, decision.kind
