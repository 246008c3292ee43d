"""What a worker and its reader processes send each other: pickled objects, with the memory of arrays beside them.

Both ends are processes of one user and one job, joined by a socket that no other process has. Classes that the script
itself defines are sent by value (cloudpickle), so a reader process never runs the script.
"""

from __future__ import annotations

import importlib
import io
import pickle
import socket
import struct
import sys
from types import ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch

_ALIGN = 64  # bytes; where an array's memory starts
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class Closed(Exception):
    """The other end is gone."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors in the memory of this process go as their bytes; arrays do so by themselves.

    A module with a class of its own, as `gba_hvd` has, goes by its name: classes of a script refer to it.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            name = obj.__name__
            if sys.modules.get(name) is obj:
                return importlib.import_module, (name,)
        if (
            type(obj) is torch.Tensor
            and obj.device.type == "cpu"
            and obj.layout == torch.strided
            and not obj.is_quantized
        ):
            values = obj.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return _tensor, (pickle.PickleBuffer(values.data), obj.dtype, tuple(obj.shape), obj.requires_grad)
        return super().reducer_override(obj)


def _tensor(values: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    flat = torch.frombuffer(values, dtype=dtype) if len(values) else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def packed(value: Any) -> list[Any]:
    """A value as parts, the first its pickle, the others the memory of its arrays and tensors."""
    stream, arrays = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(stream, protocol=5, buffer_callback=arrays.append).dump(value)
    return [stream.getbuffer(), *(array.raw() for array in arrays)]


def joined(parts: list[Any]) -> bytes:
    """The parts one after the other, each at a multiple of 64 bytes, after their number and lengths."""
    head = _COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(part.nbytes) for part in parts)
    pieces: list[Any] = [head, bytes(-len(head) % _ALIGN)]
    for part in parts:
        pieces += [part, bytes(-part.nbytes % _ALIGN)]
    return b"".join(pieces)


def unpacked(data: Any) -> Any:
    """The value of `joined(packed(value))`. Its arrays and tensors lie in `data`, which they write to if written."""
    view = memoryview(data)
    (n,) = _COUNT.unpack_from(view)
    lengths = [_LENGTH.unpack_from(view, _COUNT.size + _LENGTH.size * i)[0] for i in range(n)]
    at = _COUNT.size + _LENGTH.size * n
    parts = []
    for length in lengths:
        at += -at % _ALIGN
        parts.append(view[at : at + length])
        at += length
    return pickle.loads(parts[0], buffers=parts[1:])


def send(end: socket.socket, value: Any) -> None:
    """Raises Closed when the other end is gone, and what pickling raises before anything is sent."""
    data = joined(packed(value))
    try:
        end.sendall(_LENGTH.pack(len(data)))
        end.sendall(data)
    except OSError as error:
        raise Closed(str(error)) from error


def receive(end: socket.socket) -> Any:
    """Waits for a value. Raises Closed when the other end is gone, and what unpickling raises."""
    (length,) = _LENGTH.unpack(_exactly(end, _LENGTH.size))
    return unpacked(_exactly(end, length))


def _exactly(end: socket.socket, n: int) -> memoryview:
    data = np.empty(n, dtype=np.uint8).data.cast("B")
    got = 0
    while got < n:
        try:
            more = end.recv_into(data[got:])
        except OSError as error:
            raise Closed(str(error)) from error
        if not more:
            raise Closed("the other end was closed")
        got += more
    return data
