"""A checkpoint of an asynchronous mode, at the coordinator: all servers save as of the same step.

Asked for at any time, it waits for a moment between two steps, which `executor` knows.
"""

from __future__ import annotations

import logging

import msgspec

from gba_hvd.ps.coordinator.peers import Peers
from gba_hvd.ps.messages import JobPosition, Save
from gba_hvd.ps.partition.checkpoint_state import asynchronous_state, part_state
from gba_hvd.ps.partition.partition import Partition
from gba_hvd.ps.partition.saver import Saver
from recovery.catalog.epoch_position import EpochPosition

log = logging.getLogger("gba_hvd.ps")


class PendingSave:
    """Belongs to the server's main thread."""

    def __init__(self, part: Partition, peers: Peers, saver: Saver) -> None:
        self._part, self._peers, self._saver = part, peers, saver
        self._request: Save | None = None
        self._snapshot = b""
        self._asked: tuple[int, int] | None = None  # (epoch, number) of the newest one

    @property
    def is_waiting(self) -> bool:
        return self._request is not None

    def ask(self, request: Save, snapshot: bytes) -> None:
        """Instead of one that still waits. snapshot: the chief's training state, see `checkpoint_state`.

        The same one again, which its sender repeats until it has the answer, changes nothing.
        """
        asked = (request.epoch, request.number)
        if asked == self._asked and self._saver.report().state != "failed":
            return
        self._asked = asked
        self._request, self._snapshot = request, snapshot

    def begin(self, position: JobPosition, workers: list[int]) -> None:
        """No step is in flight. position: where to resume from; workers: those that live."""
        assert self._request is not None
        request, snapshot = self._request, self._snapshot
        self._request, self._snapshot = None, b""
        facts = {"n_parts": 1 + len(self._peers), "step": position.step, "samples": position.account["applied"]}
        number, newest = max(request.number, position.step), self._saver.report()
        if newest.epoch == request.epoch and request.number < newest.number:  # of a chief without the newest report
            number = max(number, newest.number + 1)
        about = msgspec.structs.replace(request.about, position=_as_of(position, request.about.position))
        request = msgspec.structs.replace(request, number=number, about=about, **facts)
        living = workers if request.about.is_compressed else None

        def state(extras: list[bytes]) -> bytes:
            return asynchronous_state(snapshot, extras, position, living)

        try:
            self._saver.begin(request, self._part.shards.tolist(), state, part_state(self._part))
        except Exception as error:  # no process waits for this answer: the chief receives it with the heartbeats
            log.exception("a checkpoint was not begun")
            self._saver.did_not_begin(request, f"{type(error).__name__}: {error}")
            return
        for index in self._peers:  # they get it before the next step
            self._peers.send([index], 0, msgspec.structs.replace(request, part=index))


def _as_of(position: JobPosition, known: EpochPosition | None) -> EpochPosition:
    """known: what the chief, which alone knows of segments, had of its epoch when it asked."""
    n_segments = known.n_segments if known is not None and known.epoch == position.epoch else 0
    return EpochPosition(position.epoch, position.steps_done, position.n_steps, position.segment, n_segments)
