"""A host's memory as a tensor of a GPU, which reads and writes it over the bus.

The memory is registered with the GPU's driver, which locks its pages; nothing is copied. For a CPU, the same tensor is
the memory itself: what is built on it runs on both.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gba_hvd.embedding.on_device import streams
from gba_hvd.errors import GbaError

_PORTABLE = 1  # of cudaHostRegister: for every context of this process


class CannotRegister(GbaError):
    """The GPU's driver does not take the memory; the message gives its reason."""


class HostView:
    """tensor: float32 [n], on `device`, over the numbers of `flat`. `close` before `flat` may go."""

    def __init__(self, flat: np.ndarray, device: torch.device) -> None:
        """Raises CannotRegister."""
        self.device = device
        self._let_go: Any = None
        if device.type == "cpu":
            self.tensor: Tensor = torch.from_numpy(flat)
            return
        _register(flat, device)
        self._let_go = weakref.finalize(self, _unregister, flat)
        self.tensor = torch.as_tensor(_Array(flat), device=device)

    def close(self) -> None:
        """May be called twice."""
        self.tensor = torch.empty(0)
        if self._let_go is not None:
            self._let_go()


class _Array:
    """An array as libraries for GPUs hand it to each other."""

    def __init__(self, flat: np.ndarray) -> None:
        self._kept = flat
        self.__cuda_array_interface__ = {
            "shape": flat.shape, "typestr": flat.dtype.str, "data": (flat.ctypes.data, False), "version": 3,
        }  # fmt: skip


def _register(flat: np.ndarray, device: torch.device) -> None:
    runtime: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # (makes the context, where this is the first use)
        status = int(runtime.cudaHostRegister(flat.ctypes.data, flat.nbytes, _PORTABLE))
        if status == 0:
            return
        with contextlib.suppress(RuntimeError):  # the driver reports its error once more, to the next call
            torch.zeros(1, device=device)
        raise CannotRegister(
            f"the driver of {device} refused to register {flat.nbytes / 2**30:.1f} GiB of the host's memory "
            f"({runtime.cudaGetErrorString(runtime.cudaError(status))})"
        )


def _unregister(flat: np.ndarray) -> None:
    runtime: Any = torch.cuda.cudart()
    runtime.cudaHostUnregister(flat.ctypes.data)


class HostWrites:
    """Writes of a device to the host's memory: in the order in which they are asked for, beside its other work."""

    def __init__(self, device: torch.device) -> None:
        self._streams = streams.of(device)
        self._stream = None if self._streams is None else self._streams.new()

    @contextlib.contextmanager
    def after(self, *used: Tensor) -> Iterator[None]:
        """What is asked of the device in here is done after all that was asked so far.

        used: tensors that it needs, made outside
        """
        if self._streams is None or self._stream is None:
            yield
            return
        self._stream.wait_stream(self._streams.current())
        with self._streams.using(self._stream):
            yield
        self._streams.used_by(self._stream, *used)

    def before_reading(self) -> None:
        """What is asked of the device from now on is done after the writes so far."""
        if self._streams is not None and self._stream is not None:
            self._streams.current().wait_stream(self._stream)

    def wait(self) -> None:
        """Return when the host's memory has all of them. From any thread."""
        if self._stream is not None:
            self._stream.synchronize()


class NumberOnItsWay:
    """A copy of a device's number to the host, which has begun: `get` waits for it, and for nothing asked for later."""

    def __init__(self, number: Tensor) -> None:
        """number: of one element"""
        number = number.reshape(())
        self._number, self._is_there = number, None
        if (of_device := streams.of(number.device)) is not None:
            pins = number.device.type == "cuda"
            self._number = torch.empty((), dtype=number.dtype, pin_memory=pins).copy_(number, non_blocking=True)
            self._is_there = of_device.event()
            self._is_there.record(of_device.current())

    def get(self) -> float:
        if self._is_there is not None:
            self._is_there.synchronize()
        return float(self._number)


def number_of(value: Tensor | float | None) -> Callable[[], float | None]:
    """What gives the number; if a device computes it, it is on its way from now on."""
    if isinstance(value, Tensor):
        return NumberOnItsWay(value.detach()).get
    return lambda: None if value is None else float(value)


def pinned(device: torch.device, *shape: int) -> Tensor:
    """int64, not initialised, in the host's memory, from where a copy to the device does not wait."""
    return torch.empty(shape, dtype=torch.int64, pin_memory=device.type == "cuda")


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a GPU, through pinned memory and without waiting for it; the array itself on a CPU."""
    values = torch.from_numpy(array)
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)
