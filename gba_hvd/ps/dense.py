"""The dense parameters one server holds, stepped by the user's torch optimizer, in a file that survives the server.

The server steps a private copy. Each step is then published: values and optimizer state go into that one of the file's
two halves which nobody is told to read, then one aligned int64, `active`, names step and half. So a process killed at
any instruction leaves the last whole step, for `DensePart.open` and for readers. x86-64 store order is assumed.

    head    int64 [512]      magic, active = 2 * step + half, then of each half: generation, place and room of its state
    about   JSON             tensors, optimizer, dtype; never changes
    values  [n] twice        at fixed places, so that a reader maps them once
    shown   [n] twice        only where an update rule shows workers other values than the model's
    state   two areas        placed and enlarged as the optimizer's state appears

A half's generation is odd while it is written; a reader takes what it copied only if the generation stayed the same.
Not decided here: which tensors a server holds, what the gradient of a step is, when to step.
"""

from __future__ import annotations

import json
import mmap
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.errors import BadInput, ShardMemoryError, StateMismatch
from gba_hvd.torch_optimizers import build
from recovery import state_codec

_MAGIC = 0x6762612D646E7332  # "gba-dns2"
_DTYPES = ("float16", "float32", "float64")
_PAGE, _ALIGN, _AREA_HEAD = 4096, 64, 64
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


class DensePart:
    """Made with `create` or `open`; belongs to one process and one thread. `close()` may be called twice.

    step:    the last whole step
    values:  [n], a read-only view of the current values, all tensors in order; it changes in place with each step
    shown:   the same of what workers are shown: `values`, unless a rule says otherwise
    tensors: what the values are
    """

    def __init__(self, file: _File) -> None:
        self._file = file
        self.tensors: tuple[DenseTensor, ...] = file.tensors
        self._spec: dict[str, Any] = file.about["optimizer"]
        flat, gradient = np.zeros(file.n, file.dtype), np.zeros(file.n, file.dtype)
        self._flat, self._gradient = flat, gradient
        self.values = flat.view()
        self.values.flags.writeable = False
        self.shown = np.zeros(file.n, file.dtype) if file.shows else self.values
        self.step, self._plan = -1, _Plan.of([], ())
        self._places: dict[int, list[Tensor]] = {0: [], 1: []}
        ends = np.cumsum([0, *(t.size for t in self.tensors)])
        self._views = [
            torch.from_numpy(flat[a:b]).view(t.shape) for t, a, b in zip(self.tensors, ends[:-1], ends[1:], strict=True)
        ]
        self._params = [view.detach().requires_grad_() for view in self._views]
        for param, t, a in zip(self._params, self.tensors, ends[:-1], strict=True):
            param.grad = torch.from_numpy(gradient[a : a + t.size]).view(t.shape)
        self._optimizer = self._build()

    @classmethod
    def create(
        cls,
        path: Path,
        tensors: Sequence[DenseTensor],
        optimizer: Mapping[str, Any],
        values: np.ndarray,
        state: Sequence[Mapping[str, Any]],
        step: int,
        dtype: str = "float32",
        shown: np.ndarray | None = None,
    ) -> DensePart:
        """Make the file at `path`, in place of an older one, whole from the first moment it is seen there.

        optimizer: as of `torch_optimizers.spec_of`. values: [n]. state: of each tensor, as in `optimizer.state[p]`;
        an empty dict leaves what the optimizer begins with. shown: [n], what workers are to see in place of the values.
        Readers of an older file go on seeing that one.

        Raises BadInput when the arguments do not fit each other, ShardMemoryError when the file cannot be made.
        """
        n = sum(t.size for t in tensors)
        if dtype not in _DTYPES:
            raise BadInput(f"dense parameters of {dtype} cannot be held by a server, expected one of {_DTYPES}")
        for given in (values, *(() if shown is None else (shown,))):
            if given.shape != (n,) or given.dtype != dtype:
                raise BadInput(f"expected {n} values of {dtype} for {len(tensors)} tensors, got {_kind(given)}")
        if len(state) != len(tensors):
            raise BadInput(
                f"expected optimizer state for {len(tensors)} tensors, got {len(state)} (empty dicts will do)"
            )
        for t in tensors:
            if not 0 <= t.group < len(optimizer["groups"]):
                raise BadInput(f"{t.name} is in group {t.group}, the optimizer has {len(optimizer['groups'])} groups")
        temporary = path.with_name(f"{path.name}.new-{os.getpid()}")
        about = {
            "tensors": [asdict(t) for t in tensors], "optimizer": dict(optimizer), "dtype": dtype,
            "shows": shown is not None,
        }  # fmt: skip
        part = None
        try:
            part = cls(_File.create(temporary, about))
            part._flat[:] = values
            part._set_state(state)
            if shown is not None:
                part.shown[:] = shown
            part._publish(step)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            if part is not None:
                part.close()
            raise
        part._file.path = path
        return part

    @classmethod
    def open(cls, path: Path) -> DensePart:
        """What an earlier process left at `path`, as of its last whole step.

        Raises ShardMemoryError when there is no such file or it is damaged.
        """
        part = cls(_File.open(path))
        part._load()
        return part

    def step_(self, grad: np.ndarray, lrs: Sequence[float], step: int) -> None:
        """Step the optimizer once, then publish. If anything raises, all is as after the last whole step.

        grad: [n], the gradient of the step. lrs: learning rate of each group. step: later than the last one.
        """
        self._check(step)
        if grad.shape != self._gradient.shape or grad.dtype != self._gradient.dtype:
            raise BadInput(f"step {step}: expected a gradient of {_kind(self._gradient)}, got {_kind(grad)}")
        if len(lrs) != len(self._optimizer.param_groups):
            raise BadInput(
                f"step {step}: expected a learning rate for each of {len(self._optimizer.param_groups)} groups, "
                f"got {len(lrs)}"
            )
        try:
            self._gradient[:] = grad
            for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
                group["lr"] = float(lr)
            if self._params:
                self._optimizer.step()
            for param, view in zip(self._params, self._views, strict=True):
                if param.data_ptr() != view.data_ptr():  # an optimizer that puts a new tensor into `param.data`
                    param.data = view.copy_(param.detach())
            self._publish(step)
        except BaseException:
            self._load()
            raise

    def put_(
        self, values: np.ndarray, momentum: np.ndarray, shown: np.ndarray | None, lrs: Sequence[float], step: int
    ) -> None:
        """Take a step that a rule made in the optimizer's place, then publish; as `step_` when anything raises.

        values, momentum: [n], after the step; shown: [n] where there is something to show, or None.
        """
        self._check(step)
        try:
            self._flat[:] = values
            for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
                group["lr"] = float(lr)
            at = 0
            for param in self._params:
                buffer = torch.from_numpy(momentum[at : at + param.numel()]).view(param.shape)
                self._optimizer.state[param]["momentum_buffer"] = buffer
                at += param.numel()
            if shown is not None:
                self.shown[:] = shown
            self._publish(step)
        except BaseException:
            self._load()
            raise

    def replace_(self, values: np.ndarray | None, state: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Other values [n], other optimizer state, or both, as of the same step. If anything raises, all is as before.

        Readers who ask for something newer than this step are not told.
        """
        try:
            if values is not None:
                self._flat[:] = values
            if state is not None:
                self._set_state(state)
            self._publish(self.step)
        except BaseException:
            self._load()
            raise

    def skip_(self, step: int) -> None:
        """Publish the same values under a new step number (a step this server missed)."""
        self._check(step)
        self._file.activate(step, self._file.half)
        self.step = step

    def state(self) -> list[dict[str, Any]]:
        """The optimizer's state of each tensor, copies, as `create` takes it; bit-exact."""
        copied: list[dict[str, Any]] = state_codec.decode(state_codec.encode(self._state()))
        return copied

    @property
    def path(self) -> Path:
        return self._file.path

    def close(self) -> None:
        """Let go of the file; it stays where it is."""
        self._places = {0: [], 1: []}
        self._file.close()

    # -----------------------------------------------------------------------------------------------------------------

    def _check(self, step: int) -> None:
        if step <= self.step:
            raise StateMismatch(
                f"step {step} cannot be taken: the dense part at {self._file.path} has {self.step} already"
            )

    def _build(self) -> torch.optim.Optimizer:
        by_group: list[list[Tensor]] = [[] for _ in self._spec["groups"]]
        for tensor, param in zip(self.tensors, self._params, strict=True):
            by_group[tensor.group].append(param)
        return build(self._spec, by_group)

    def _state(self) -> list[dict[str, Any]]:
        states = self._optimizer.state
        return [dict(states[param]) if param in states else {} for param in self._params]

    def _set_state(self, state: Sequence[Mapping[str, Any]]) -> None:
        copied = state_codec.decode(state_codec.encode([dict(entries) for entries in state]))
        for param, entries in zip(self._params, copied, strict=True):
            if entries:
                self._optimizer.state[param] = entries

    def _publish(self, step: int) -> None:
        state = self._state()
        if self._plan.signature != (signature := _signature(state)):
            self._plan, self._places = _Plan.of(state, signature), {0: [], 1: []}
        plan, file, half = self._plan, self._file, 1 - self._file.half
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self._optimizer.param_groups]
        plain = {i: other for i, e in enumerate(state) if (other := {k: v for k, v in e.items() if not _is_raw(v)})}
        changing = state_codec.encode([groups, plain])
        small = plan.directory + changing
        file.begin(half)
        if file.reserve(half, plan.end + len(small)):
            self._places = {0: [], 1: []}  # the file is mapped anew
        area = file.area(half)
        self._places[half] = self._places[half] or [
            area[a:b].view(kind).view(shape) for a, b, kind, shape in plan.spans
        ]
        file.values(half)[:] = self._flat
        if file.shows:
            file.shown(half)[:] = self.shown
        raw = (v for entries in state for v in entries.values() if _is_raw(v))
        for place, tensor in zip(self._places[half], raw, strict=True):
            place.copy_(tensor)
        area[plan.end : plan.end + len(small)] = torch.frombuffer(bytearray(small), dtype=torch.uint8)
        head = (plan.end, len(plan.directory), len(changing))
        area[:_AREA_HEAD].view(torch.int64)[:4] = torch.tensor([*head, _crc(head, small)])
        file.finish(half)
        file.activate(step, half)  # last: from here on this is the step
        self.step = step

    def _load(self) -> None:
        """Make the private copy what the active half is."""
        file = self._file
        self.step, self._flat[:] = file.step, file.values(file.half)
        if file.shows:
            self.shown[:] = file.shown(file.half)
        area = file.area(file.half)
        end, n_directory, n_changing, crc = area[:_AREA_HEAD].view(torch.int64)[:4].tolist()
        small = area[end : end + n_directory + n_changing].numpy().tobytes()
        if crc != _crc((end, n_directory, n_changing), small):
            raise ShardMemoryError(f"{file.path} is damaged at step {self.step}: remove it; a checkpoint may have it")
        groups, plain = state_codec.decode(small[n_directory:])
        self._optimizer = self._build()
        for group, hyper in zip(self._optimizer.param_groups, groups, strict=True):
            group.update(hyper)
        for i, (param, entries) in enumerate(zip(self._params, state_codec.decode(small[:n_directory]), strict=True)):
            self._optimizer.state[param] = {
                key: plain[i][key]
                if at is None
                else area[at : at + n_bytes].clone().view(getattr(torch, dtype)).view(shape)
                for key, at, n_bytes, dtype, shape in entries
            }


class DenseReader:
    """What a dense part shows to workers, for another process of the host.

    Raises ShardMemoryError when there is no dense part at `path`.
    """

    def __init__(self, path: Path) -> None:
        file = _File.open(path, writable=False)
        self.tensors, self.n, self.dtype = file.tensors, file.n, file.dtype
        self._file = file

    def read(self, out: np.ndarray, newer_than: int) -> int:
        """Copy the values into `out` [n] if they are of a later step; returns the step of what `out` holds then.

        Never waits for a writer, also not for one that died: it copies again only if two steps ended meanwhile.
        """
        if out.shape != (self.n,) or out.dtype != self.dtype:
            raise BadInput(f"expected room for {self.n} values of {self.dtype}, got {_kind(out)}")
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


class _File:
    """The mapped file: where things are in it, and the few numbers whose order makes steps visible."""

    def __init__(self, path: Path, fd: int, writable: bool) -> None:
        self.path, self._fd, self._writable = path, fd, writable
        self._map()
        if len(self._bytes) < _PAGE or self._words[_IS] != _MAGIC:
            raise ShardMemoryError(f"{path} is no dense part of this version: remove it")
        self.about = json.loads(self._bytes[_PAGE : _PAGE + int(self._words[_ABOUT_SIZE])].tobytes())
        self.tensors = tuple(DenseTensor(t["name"], tuple(t["shape"]), t["group"]) for t in self.about["tensors"])
        self.n, self.dtype = sum(t.size for t in self.tensors), np.dtype(self.about["dtype"])
        self.shows = bool(self.about["shows"])

    @classmethod
    def create(cls, path: Path, about: dict[str, Any]) -> _File:
        text = json.dumps(about).encode()
        size = sum(prod(t["shape"]) for t in about["tensors"]) * np.dtype(about["dtype"]).itemsize
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
    def open(cls, path: Path, writable: bool = True) -> _File:
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
        size = self.n * self.dtype.itemsize
        at = _PAGE + _pages(int(self._words[_ABOUT_SIZE])) + number * _pages(size)
        return self._bytes[at : at + size].view(self.dtype)

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
class _Plan:
    """Where the tensors of the state lie in an area; as long as no tensor appears or changes its kind, it stays.

    signature: what it was made for. spans: (start, end, dtype, shape) of each tensor. end: the first byte behind them.
    directory: as bytes, for each dense tensor its entries: (key, start, bytes, dtype, shape), nothing but key if plain.
    """

    signature: tuple[Any, ...]
    directory: bytes
    spans: list[tuple[int, int, torch.dtype, torch.Size]]
    end: int

    @classmethod
    def of(cls, state: list[dict[str, Any]], signature: tuple[Any, ...]) -> _Plan:
        at, spans, directory = _AREA_HEAD, [], []
        for entries in state:
            listed: list[tuple[Any, ...]] = []
            for key, value in entries.items():
                if not _is_raw(value):
                    listed.append((key, None, 0, "", ()))
                    continue
                n_bytes = value.numel() * value.element_size()
                listed.append((key, at, n_bytes, str(value.dtype)[6:], tuple(value.shape)))
                spans.append((at, at + n_bytes, value.dtype, value.shape))
                at += -(-n_bytes // _ALIGN) * _ALIGN
            directory.append(listed)
        return cls(signature, state_codec.encode(directory), spans, at)


def _signature(state: list[dict[str, Any]]) -> tuple[Any, ...]:
    return tuple(
        tuple((k, v.dtype, v.shape) if _is_raw(v) else (k, None, None) for k, v in entries.items()) for entries in state
    )


def _is_raw(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _crc(head: tuple[int, int, int], small: bytes) -> int:
    return zlib.crc32(small, zlib.crc32(np.array(head, dtype=np.int64).tobytes()))


def _copy(out: np.ndarray, values: np.ndarray) -> None:
    out[:] = values


def _pages(n_bytes: int) -> int:
    return -(-n_bytes // _PAGE) * _PAGE


def _allocate(path: Path, fd: int, at: int, n_bytes: int) -> None:
    """Take the space now, so that no later write can fail for lack of it."""
    try:
        os.posix_fallocate(fd, at, n_bytes)
    except OSError as error:
        raise ShardMemoryError(
            f"no room for {n_bytes} bytes of dense parameters and optimizer state in {path.parent}: {error.strerror}; "
            "name a larger folder with GBA_HVD_SHARD_DIR"
        ) from error


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype} {list(array.shape)}"
