"""What the workers of a host had not sent yet, as of a server's newest step: for checkpoints of asynchronous modes.

A worker's residual changes with every push, and which pushes a checkpoint has only the servers know. So each push to
the first server of the worker's own host, which is reached through memory, carries the residual after it. It counts
from the step on that the push is applied in: a save between two steps finds what belongs to its rows and dense values,
and the micro-batches of all other pushes are computed again, with no residual of them.

Who owns what: the first server of each host, for the workers of this host. What a crash leaves behind:

    a worker          its residual is discarded with the next step, lost as it is without checkpoints
    this server       a file has the residuals of its newest step, or of the one it was applying: that one's pushes are
                      over, applied or missed. Those of pushes that waited are gone with them
    the whole job     what the newest checkpoint says: all residuals together, for one worker of the job that resumes
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gba_hvd.ps import messages, validation
from gba_hvd.ps.messages import ProtocolError
from gba_hvd.ps.partition.push_buffer import BufferedPush
from gba_hvd.shm.snapshot_file import SnapshotFile

log = logging.getLogger("gba_hvd.ps")
_HEAD, _ONE = struct.Struct("<qq"), struct.Struct("<qqq")  # generation, workers; of each: id, serial, elements


def total(residuals: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """Their sum; None when nothing waits."""
    waiting = [residual for residual in residuals if residual is not None and len(residual)]
    return np.asarray(np.sum(waiting, axis=0, dtype=np.float32)) if waiting else None


class Residuals:
    """Not thread-safe: belongs to the server's main thread. The file is there once a worker has reported."""

    def __init__(self, path: Path, generation: int) -> None:
        self._path, self._generation = path, generation
        self._file: SnapshotFile | None = None
        self._has_room = True
        self._of: dict[int, tuple[int, np.ndarray]] = {}  # by worker: serial of its newest push that counts

    @classmethod
    def none(cls, path: Path, generation: int) -> Residuals:
        """No residuals: a mode begins."""
        path.unlink(missing_ok=True)
        return cls(path, generation)

    @classmethod
    def resume(cls, path: Path, generation: int) -> Residuals:
        """As a server that died had them. Raises ShardMemoryError when the file is damaged."""
        found = cls(path, generation)
        if path.exists():
            found._file = SnapshotFile(path)
            found._read(found._file.read())
        return found

    @property
    def workers(self) -> list[int]:
        """Those it is known of."""
        return sorted(self._of)

    def total(self) -> np.ndarray | None:
        """The sum over the workers, float32 [n of all dense]; None when nothing waits."""
        return total([residual for _, residual in self._of.values()])

    def check(self, frame: Any) -> np.ndarray:
        """A residual as it comes, empty when nothing waits. Raises ProtocolError."""
        residual = validation.array_of(frame, "float32", "residual")
        sizes = {len(known) for _, known in self._of.values() if len(known)} | (
            {len(residual)} if len(residual) else set()
        )
        if len(sizes) > 1:
            raise ProtocolError(f"a residual of {len(residual)} numbers, others have {sorted(sizes)}")
        if not validation.all_finite(residual):
            raise messages.NotFinite("the residual is not finite")
        return residual

    def came(self, worker: int, frame: Any) -> None:
        """What a worker brings into the mode. Sent again, or too late, it changes nothing. Raises ProtocolError."""
        residual = self.check(frame)
        if worker not in self._of:
            self._of[worker] = -1, residual
            self._write()

    def applied(self, pushes: Iterable[BufferedPush]) -> None:
        """These are part of the step: what was left after each worker's newest one is its residual now."""
        newer = False
        for push in pushes:
            if push.residual is not None and push.serial > self._of.get(push.worker, (-2,))[0]:
                self._of[push.worker], newer = (push.serial, push.residual), True
        if newer:
            self._write()

    def forget(self, worker: int) -> None:
        if self._of.pop(worker, None) is not None:
            self._write()

    def _write(self) -> None:
        """Where the memory has no room for it, a successor will know nothing; that is no reason to stop a step."""
        if not self._has_room:
            return
        heads = [_ONE.pack(worker, serial, len(residual)) for worker, (serial, residual) in self._of.items()]
        values: list[Any] = [np.ascontiguousarray(residual).view(np.uint8).data for _, residual in self._of.values()]
        try:
            if self._file is None:
                self._file = SnapshotFile(self._path)
            self._file.write(_HEAD.pack(self._generation, len(heads)), *heads, *values)
        except OSError as error:
            log.warning("what workers had not sent will not outlive this server, %s: %s", self._path, error)
            self._has_room, self._file = False, None
            self._path.unlink(missing_ok=True)  # rather none than an old one

    def _read(self, data: bytes | None) -> None:
        if data is None:
            return
        generation, n = _HEAD.unpack_from(data)
        if generation != self._generation:
            return
        at = _HEAD.size + n * _ONE.size
        for i in range(n):
            worker, serial, size = _ONE.unpack_from(data, _HEAD.size + i * _ONE.size)
            self._of[worker] = serial, np.frombuffer(data, np.float32, size, at)
            at += 4 * size
