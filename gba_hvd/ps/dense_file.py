"""The file of a server with its dense part: double-buffered, and read by the workers of its host without asking."""

from __future__ import annotations

import json
import mmap
import os
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import BadInput, ShardMemoryError
from gba_hvd.shm.file_space import take
from recovery import state_codec

_MAGIC = 0x6762612D646E7332  # "gba-dns2"
_ITEM_BYTES = 4  # float32


class DenseReader:
    """What a dense part shows to workers, for another process of the host.

    Raises ShardMemoryError when there is no dense part at `path`.
    """

    def __init__(self, path: Path) -> None:
        file = DenseFile.open(path, writable=False)
        self.tensors, self.n = file.tensors, file.n
        self._file = file

    def read(self, out: np.ndarray, newer_than: int) -> int:
        """Copy the values into `out` [n] if they are of a later step; returns the step of what `out` holds then.

        Never waits for a writer, also not for one that died: it copies again only if two steps ended meanwhile.
        """
        if out.shape != (self.n,) or out.dtype != np.float32:
            raise BadInput(f"expected room for {self.n} values of float32, got {kind_of(out)}")
        while True:
            active = self._file.active
            step, half = active >> 1, active & 1
            if step <= newer_than:
                return newer_than
            generation = self._file.generation(half)
            if generation % 2 or self._file.active != active:
                continue  # this half is written again, or was: a newer one is there
            _copy(out, self._file.shown(half))
            if self._file.generation(half) == generation:
                return step

    def close(self) -> None:
        self._file.close()


class DenseFile:
    """The mapped file: where things are in it, and the few numbers whose order makes steps visible."""

    def __init__(self, path: Path, fd: int, writable: bool) -> None:
        self.path, self._fd, self._writable = path, fd, writable
        self._map()
        if len(self._bytes) < _PAGE or self._words[_IS] != _MAGIC:
            raise ShardMemoryError(f"{path} is no dense part of this version: remove it")
        self.about = json.loads(self._bytes[_PAGE : _PAGE + int(self._words[_ABOUT_SIZE])].tobytes())
        self.tensors = tuple(DenseTensor(t["name"], tuple(t["shape"]), t["group"]) for t in self.about["tensors"])
        self.n = sum(t.size for t in self.tensors)
        self.shows = bool(self.about["shows"])

    @classmethod
    def create(cls, path: Path, about: dict[str, Any]) -> DenseFile:
        text = json.dumps(about).encode()
        size = sum(prod(t["shape"]) for t in about["tensors"]) * _ITEM_BYTES
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        head = np.zeros(_PAGE // 8, dtype=np.int64)
        head[_IS], head[_ABOUT_SIZE] = _MAGIC, len(text)
        try:
            _allocate(path, fd, 0, _PAGE + _pages(len(text)) + (4 if about["shows"] else 2) * _pages(size))
            os.pwrite(fd, head.tobytes() + text, 0)
            return cls(path, fd, writable=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: Path, writable: bool = True) -> DenseFile:
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        except OSError as error:
            raise ShardMemoryError(f"no dense part can be opened at {path}: {error.strerror}") from error
        try:
            return cls(path, fd, writable)
        except BaseException:
            os.close(fd)
            raise

    @property
    def active(self) -> int:
        return int(self._words[_ACTIVE])

    @property
    def step(self) -> int:
        return self.active >> 1

    @property
    def half(self) -> int:
        return self.active & 1

    def generation(self, half: int) -> int:
        return int(self._words[_GENERATION + half])

    def begin(self, half: int) -> None:
        self._words[_GENERATION + half] |= 1  # odd already if a writer died here

    def finish(self, half: int) -> None:
        self._words[_GENERATION + half] += 1

    def activate(self, step: int, half: int) -> None:
        self._words[_ACTIVE] = 2 * step + half

    def values(self, half: int) -> np.ndarray:
        return self._array(half)

    def shown(self, half: int) -> np.ndarray:
        return self._array(half + 2 if self.shows else half)

    def _array(self, number: int) -> np.ndarray:
        size = self.n * _ITEM_BYTES
        at = _PAGE + _pages(int(self._words[_ABOUT_SIZE])) + number * _pages(size)
        return self._bytes[at : at + size].view(np.float32)

    def area(self, half: int) -> Tensor:
        """uint8 [room], a view: the state of a half."""
        at = int(self._words[_AREA_AT + half])
        return torch.from_numpy(self._bytes[at : at + int(self._words[_AREA_SIZE + half])])

    def reserve(self, half: int, n_bytes: int) -> bool:
        """Make room for the state of a half, which loses what it held; True if it moved."""
        if n_bytes <= self._words[_AREA_SIZE + half]:
            return False
        at, room = _pages(os.fstat(self._fd).st_size), _pages(n_bytes + _PAGE)
        _allocate(self.path, self._fd, at, room)
        self._words[_AREA_AT + half] = at  # before its size: the smaller room fits at the new place too
        self._words[_AREA_SIZE + half] = room
        self._map()
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._words = self._bytes = np.zeros(0, dtype=np.uint8)  # the mapping goes with its last view

    def _map(self) -> None:
        access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_READ
        size = os.fstat(self._fd).st_size
        if size < _PAGE:
            raise ShardMemoryError(f"{self.path} is no dense part: it has {size} bytes; remove it")
        self._bytes = np.frombuffer(mmap.mmap(self._fd, size, access=access), dtype=np.uint8)
        self._words = self._bytes[:_PAGE].view(np.int64)


@dataclass(frozen=True)
class StatePlan:
    """Where the tensors of the state lie in an area; as long as no tensor appears or changes its kind, it stays.

    signature: what it was made for. spans: (start, end, dtype, shape) of each tensor. end: the first byte behind them.
    directory: as bytes, for each dense tensor its entries: (key, start, bytes, dtype, shape), nothing but key if plain.
    """

    signature: tuple[Any, ...]
    directory: bytes
    spans: list[tuple[int, int, torch.dtype, torch.Size]]
    end: int

    @classmethod
    def of(cls, state: list[dict[str, Any]], signature: tuple[Any, ...]) -> StatePlan:
        at, spans, directory = AREA_HEAD, [], []
        for entries in state:
            listed: list[tuple[Any, ...]] = []
            for key, value in entries.items():
                if not is_raw(value):
                    listed.append((key, None, 0, "", ()))
                    continue
                n_bytes = value.numel() * value.element_size()
                listed.append((key, at, n_bytes, str(value.dtype)[6:], tuple(value.shape)))
                spans.append((at, at + n_bytes, value.dtype, value.shape))
                at += -(-n_bytes // _ALIGN) * _ALIGN
            directory.append(listed)
        return cls(signature, state_codec.encode(directory), spans, at)


def signature(state: list[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(
        tuple((k, v.dtype, v.shape) if is_raw(v) else (k, None, None) for k, v in entries.items()) for entries in state
    )


def is_raw(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def crc_of(head: tuple[int, int, int], small: bytes) -> int:
    return zlib.crc32(small, zlib.crc32(np.array(head, dtype=np.int64).tobytes()))


def _copy(out: np.ndarray, values: np.ndarray) -> None:
    out[:] = values


def _pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE


def _allocate(path: Path, fd: int, at: int, n_bytes: int) -> None:
    """Take the space now, so that no later write can fail for lack of it."""
    take(fd, at, n_bytes, "dense parameters and optimizer state", path.parent)


def kind_of(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"


_PAGE, _ALIGN, AREA_HEAD = 4096, 64, 64
# Words of the head; the last three once for each half.
_IS, _ACTIVE, _ABOUT_SIZE, _GENERATION, _AREA_AT, _AREA_SIZE = 0, 1, 2, 4, 6, 8


@dataclass(frozen=True)
class DenseTensor:
    """One dense parameter: its name, shape, and the number of its group in the optimizer's description."""

    name: str
    shape: tuple[int, ...]
    group: int

    @property
    def size(self) -> int:
        return prod(self.shape)
