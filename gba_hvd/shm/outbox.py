"""How the workers of one host hand each other row gradients: through memory, without a copy to the network.

Every worker owns one file with two halves. The message of step k goes to half k mod 2; `step` is written last. Readers
look only after the step's commit, which every worker enters after it has posted, so what they look for is there. A half
is written again two steps later, after a commit that every worker entered after it had read. The file outlives its
worker, so the message of a worker that died can still be read.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gba_hvd.errors import ShardMemoryError

_HEADER_WORDS = 2048  # int64 [1024]: step, then where each rank's words end
_numbers = itertools.count()


class Outbox:
    """One worker's messages for the workers of its host. The owner's `close()` removes the file."""

    def __init__(self, path: Path, half_words: int, owned: bool) -> None:
        self._path, self._owned = path, owned
        with open(path, "w+b" if owned else "r+b") as file:
            if owned:
                file.truncate(2 * 4 * half_words)  # a hole: space is taken as messages need it
            self._words = np.frombuffer(mmap.mmap(file.fileno(), 2 * 4 * half_words), dtype=np.float32)
        self._half_words, self._reserved = half_words, [0, 0]

    @classmethod
    def create(cls, folder: Path, n_words: int) -> tuple[Outbox, int]:
        """A new outbox for messages of at most n_words to all ranks together, and the number others find it by."""
        number = next(_numbers)
        return cls(cls.path(folder, os.getpid(), number), _half(n_words), owned=True), number

    @classmethod
    def open(cls, folder: Path, pid: int, number: int, n_words: int) -> Outbox:
        return cls(cls.path(folder, pid, number), _half(n_words), owned=False)

    @staticmethod
    def path(folder: Path, pid: int, number: int) -> Path:
        return folder / f"outbox-{pid}-{number}"

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
                f"{need} bytes of row gradients of one worker in one step, {4 * self._half_words} were planned for: "
                "use a smaller global batch"
            )
        if need > self._reserved[step % 2]:
            try:
                with open(self._path, "r+b") as file:
                    os.posix_fallocate(file.fileno(), (step % 2) * 4 * self._half_words, need)
            except OSError as error:
                raise ShardMemoryError(
                    f"no room for {need} bytes of row gradients in {self._path.parent.parent}: {error.strerror}; "
                    "use a smaller micro_batch, or name a larger folder with GBA_HVD_SHARD_DIR"
                ) from error
            self._reserved[step % 2] = need
        header[0] = -1
        write(half[_HEADER_WORDS : _HEADER_WORDS + n_words])
        header[1 : 1 + len(words)] = np.cumsum(words)
        header[0] = step  # last: the message is complete

    def message(self, step: int, rank: int) -> np.ndarray:
        """float32 [n], a view: what the owner left for this rank at this step."""
        half, header = self._half(step)
        if header[0] != step:
            raise ShardMemoryError(
                f"{self._path.name} holds step {header[0]}, not {step}: its worker broke the order of a step"
            )
        start = header[rank] if rank else 0
        words: np.ndarray = half[_HEADER_WORDS + start : _HEADER_WORDS + header[1 + rank]]
        return words

    def close(self) -> None:
        if self._owned:
            self._path.unlink(missing_ok=True)

    def _half(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        half = self._words[(step % 2) * self._half_words : (step % 2 + 1) * self._half_words]
        return half, half[:_HEADER_WORDS].view(np.int64)


def remove_others(folder: Path, keep: set[Path]) -> None:
    """Remove the outboxes of workers that are gone."""
    for path in folder.glob("outbox-*"):
        if path not in keep:
            path.unlink(missing_ok=True)


def _half(n_words: int) -> int:
    return -(-(_HEADER_WORDS + n_words) // 1024) * 1024
