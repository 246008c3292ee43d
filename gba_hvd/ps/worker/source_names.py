"""The names of the files or shards that this worker reads, where workers turn out to read different ones."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Sequence

from gba_hvd.comm import name_lists
from gba_hvd.errors import GbaError, StateMismatch
from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import JobPosition, OtherSources, Sources
from gba_hvd.ps.worker.heartbeat import Heartbeat

_OTHERS_S, _LOOK_S = 5.0, 0.1  # the others send their names when their next heartbeat is answered


class SourceNames:
    """One worker's, in an asynchronous mode.

    names: of what it reads now, set by the mode; empty where the dataset does not name it. `on_reply` runs on the
    client's thread, `explained` on the one that was refused.
    """

    def __init__(self, client: Client, contact: Heartbeat, worker: int, generation: int) -> None:
        self.names: Callable[[], Sequence[str]] = tuple
        self._client, self._contact, self._worker, self._generation = client, contact, worker, generation
        self._sent = 0

    def on_reply(self, position: JobPosition) -> None:
        """The answer to a heartbeat: send the names where another worker was refused."""
        if position.sources_wanted > self._sent:
            self._sent = position.sources_wanted
            self._client.send(0, Sources(self._worker, self._generation), [_packed(self.names())])

    def explained(self, refusal: StateMismatch) -> StateMismatch:
        """The refusal of this worker's samples, with what it reads and another one does not, or the other way round.

        As it is where none of the others names other sources within some seconds.
        """
        own, deadline = list(self.names()), time.monotonic() + _OTHERS_S
        while own and time.monotonic() < deadline:
            try:
                reply = self._client.call(0, Sources(self._worker, self._generation, asks=True), [_packed(own)])
            except GbaError:  # the job ends for the refusal, not for this
                break
            if isinstance(reply.body, OtherSources) and reply.frames:
                lists = {self._contact.rank: own, reply.body.rank: _unpacked(bytes(reply.frames[0]))}
                ranks = sorted(lists)
                return StateMismatch(name_lists.refusal(name_lists.differing([lists[r] for r in ranks], ranks)))
            time.sleep(_LOOK_S)
        return refusal


def _packed(names: Sequence[str]) -> bytes:
    return zlib.compress(json.dumps(list(names)).encode())


def _unpacked(names: bytes) -> list[str]:
    return [str(name) for name in json.loads(zlib.decompress(names))]
