"""How the workers of one host hand each other gradients: through memory, without a copy to the network.

Every worker owns one file with two halves. The message of step k goes to half k mod 2; `step` is written last. Readers
of row gradients look only after the step's commit, which every worker enters after it has posted, so what they look for
is there; those of the commit itself (`shm.host_sum`) wait for it. A half is written again two steps later, after a
commit that every worker entered after it had read. The file outlives its worker, so the message of a worker that died
can still be read.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gba_hvd.errors import ShardMemoryError
from gba_hvd.shm import futex
from gba_hvd.shm.file_space import map_file, set_size, take

_HEADER_WORDS = 2048  # int64 [1024]: step, then where each rank's words end; last, 1 when its owner has left
_WHAT = "gradients"
_numbers = itertools.count()


class Outbox:
    """One worker's messages for the workers of its host. The owner's `close()` removes the file.

    pid: of the owner
    """

    def __init__(self, path: Path, pid: int, half_words: int, owned: bool) -> None:
        self.path, self.pid, self._owned = path, pid, owned
        n_bytes = 2 * 4 * half_words
        with open(path, "w+b" if owned else "r+b") as file:
            if owned:
                set_size(file.fileno(), n_bytes, _WHAT, path.parent)  # a hole: space is taken as messages need it
            self._words = np.frombuffer(map_file(file.fileno(), n_bytes, _WHAT, path.parent), dtype=np.float32)
        self._half_words, self._reserved = half_words, [0, 0]
        if owned:  # neighbours read headers before there is a message
            for half in (0, 1):
                self._reserve(half, 4 * _HEADER_WORDS)

    @classmethod
    def create(cls, folder: Path, n_words: int, reserved: bool = False) -> tuple[Outbox, int]:
        """A new outbox for messages of at most n_words to all ranks together, and the number others find it by.

        reserved: all its space is taken now, so that no `post` fails for lack of it. Raises ShardMemoryError
        """
        number = next(_numbers)
        pid = os.getpid()
        found = cls(_path(folder, pid, number), pid, _half(n_words), owned=True)
        for half in (0, 1) if reserved else ():
            found._reserve(half, 4 * found._half_words)
        return found, number

    @classmethod
    def open(cls, folder: Path, pid: int, number: int, n_words: int) -> Outbox:
        return cls(_path(folder, pid, number), pid, _half(n_words), owned=False)

    def post(self, step: int, words: np.ndarray, write: Callable[[np.ndarray], None]) -> None:
        """Leave one message for each rank. words: int64 [ranks], float32 words that each gets

        write: called once with float32 [sum of words], the memory that readers map, to be filled in rank order
        Raises ShardMemoryError when the file system has no room for it.
        """
        half, header = self._half(step)
        n_words = int(words.sum())
        need = 4 * (_HEADER_WORDS + n_words)
        if need > 4 * self._half_words:
            raise ShardMemoryError(
                f"{need} bytes of gradients of one worker in one step, {4 * self._half_words} were planned for: "
                "use a smaller global batch"
            )
        self._reserve(step % 2, need)
        header[0] = -1
        write(half[_HEADER_WORDS : _HEADER_WORDS + n_words])
        header[1 : 1 + len(words)] = np.cumsum(words)
        header[0] = step  # last: the message is complete
        futex.wake(header.ctypes.data)

    def wait_posted(self, step: int, timeout_s: float) -> bool:
        """Wait until the message of this step is complete, or for so long; whether it is. May return early."""
        header = self._half(step)[1]
        found = int(header[0])
        if found != step and timeout_s > 0:
            futex.wait(header.ctypes.data, found, timeout_s)
            found = int(header[0])
        return found == step

    def message(self, step: int, rank: int) -> np.ndarray:
        """float32 [n], a view: what the owner left for this rank at this step."""
        half, header = self._half(step)
        if header[0] != step:
            raise ShardMemoryError(
                f"{self.path.name} holds step {header[0]}, not {step}: its worker broke the order of a step"
            )
        start = header[rank] if rank else 0
        words: np.ndarray = half[_HEADER_WORDS + start : _HEADER_WORDS + header[1 + rank]]
        return words

    def leave(self) -> None:
        """The owner posts no more."""
        headers = [self._half(half)[1] for half in (0, 1)]
        headers[0][-1] = 1
        for header in headers:  # neighbours may wait for either
            futex.wake(header.ctypes.data)

    @property
    def has_left(self) -> bool:
        return bool(self._half(0)[1][-1])

    def close(self) -> None:
        if self._owned:
            self.path.unlink(missing_ok=True)

    def _reserve(self, half: int, n_bytes: int) -> None:
        """Take the space of a half's first bytes now, so that no write or read fails for lack of it."""
        if n_bytes <= self._reserved[half]:
            return
        advice = ", or, for gradients of rows, use a smaller micro_batch"
        with open(self.path, "r+b") as file:
            take(file.fileno(), half * 4 * self._half_words, n_bytes, _WHAT, self.path.parent, advice)
        self._reserved[half] = n_bytes

    def _half(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        half = self._words[(step % 2) * self._half_words : (step % 2 + 1) * self._half_words]
        return half, half[:_HEADER_WORDS].view(np.int64)


def remove_others(folder: Path, keep: set[Path]) -> None:
    """Remove the outboxes of workers that are gone."""
    for path in folder.glob("outbox-*"):
        if path not in keep:
            path.unlink(missing_ok=True)


def _path(folder: Path, pid: int, number: int) -> Path:
    return folder / f"outbox-{pid}-{number}"


def _half(n_words: int) -> int:
    return -(-(_HEADER_WORDS + n_words) // 1024) * 1024
