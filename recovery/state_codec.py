"""Training state as bytes and back, without pickle: JSON for the structure, raw bytes for tensors and arrays."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recovery.errors import BadInput, Damaged


def encode(value: Any) -> bytes:
    """Bytes of a tree of dicts, lists, tuples, tensors, arrays and plain values.

    Raises BadInput naming the place of a value that is none of these.
    """
    blobs: list[bytes] = []
    header = json.dumps(_to_json(value, blobs, "state")).encode()
    return b"".join([struct.pack("<Q", len(header)), header, *blobs])


def decode(data: bytes, where: str = "the training state") -> Any:
    """The inverse of `encode`; tensors come back on the CPU.

    where: it was read from, as in "the checkpoint at s3://runs/7". Raises Damaged for bytes that `encode` did not make.
    """
    try:
        (n_header,) = struct.unpack_from("<Q", data)
        header = json.loads(data[8 : 8 + n_header])
        return _from_json(header, memoryview(data)[8 + n_header :])
    except (ValueError, LookupError, TypeError, ArithmeticError, RuntimeError, struct.error) as error:
        raise Damaged(
            f"{where}: its {len(data):,} bytes of training state cannot be read ({type(error).__name__}: {error}): "
            "another program or a newer version wrote them, or they were altered; read them with what wrote them, or "
            "go back to another checkpoint"
        ) from error


def _to_json(value: Any, blobs: list[bytes], place: str) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        return value.item()
    if isinstance(value, Tensor) and value.layout == torch.strided:
        raw = value.detach().cpu().contiguous().flatten()
        data = raw.view(torch.uint8).numpy().tobytes() if raw.numel() else b""
        return _blob("tensor", str(value.dtype)[6:], value.shape, data, blobs)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return _blob("array", value.dtype.str, value.shape, np.ascontiguousarray(value).tobytes(), blobs)
    if isinstance(value, dict):
        items = [[_to_json(k, blobs, place), _to_json(v, blobs, f"{place}[{k!r}]")] for k, v in value.items()]
        return {"kind": "dict", "items": items}
    if isinstance(value, tuple):
        return {"kind": "tuple", "items": [_to_json(v, blobs, f"{place}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_to_json(v, blobs, f"{place}[{i}]") for i, v in enumerate(value)]
    kind = "sparse Tensor" if isinstance(value, Tensor) else type(value).__name__
    raise BadInput(
        f"{place} is a {kind}, which cannot travel to other workers: use numbers, strings, lists, "
        "dicts, tensors, numpy arrays, or an object with state_dict() and load_state_dict()"
    )


def _blob(kind: str, dtype: str, shape: Any, raw: bytes, blobs: list[bytes]) -> dict[str, Any]:
    start = sum(map(len, blobs))
    blobs.append(raw)
    return {"kind": kind, "dtype": dtype, "shape": list(shape), "start": start, "size": len(raw)}


def _from_json(value: Any, blobs: memoryview) -> Any:
    if isinstance(value, list):
        return [_from_json(v, blobs) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value["kind"]
    if kind == "dict":
        return {_from_json(k, blobs): _from_json(v, blobs) for k, v in value["items"]}
    if kind == "tuple":
        return tuple(_from_json(v, blobs) for v in value["items"])
    raw = bytearray(blobs[value["start"] : value["start"] + value["size"]])
    if kind == "array":
        return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    dtype = getattr(torch, value["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {value['dtype']!r}")
    flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(value["shape"])
