"""Tensors by name as bytes and back, in the safetensors format: no pickle, and any reader of it can read them.

A file is the length of the header (uint64), the header (JSON: dtype, shape and place of each tensor), the tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gba_hvd.errors import BadInput
from recovery.errors import Damaged

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode_tensors(tensors: Mapping[str, Tensor]) -> list[bytes]:
    """Pieces of a file; equal tensors give equal bytes. Raises BadInput for a tensor of another dtype or layout."""
    header: dict[str, Any] = {}
    pieces: list[bytes] = []
    end = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):  # so that all are aligned
        tensor = tensors[name]
        if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
            raise BadInput(f"{name} is a {tensor.layout} tensor of {tensor.dtype}, which cannot be saved")
        flat = tensor.detach().cpu().contiguous().flatten()
        pieces.append(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + len(pieces[-1])],
        }  # fmt: skip
        end += len(pieces[-1])
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw = raw.ljust(-(-len(raw) // 8) * 8)
    return [len(raw).to_bytes(8, "little") + raw, *pieces]


def decode_tensors(data: bytes, name: str) -> dict[str, Tensor]:
    """The inverse of `encode_tensors`. Raises Damaged for what is no such file."""
    try:
        size = int.from_bytes(data[:8], "little")
        header, body = json.loads(data[8 : 8 + size]), memoryview(data)[8 + size :]
        found = {}
        for key, about in header.items():
            if key == "__metadata__":
                continue
            start, end = about["data_offsets"]
            dtype, shape = _DTYPES[about["dtype"]], about["shape"]
            if not 0 <= start <= end <= len(body) or end - start != dtype.itemsize * math.prod(shape):
                raise ValueError(f"{key}: bytes {start} to {end} of {len(body)} for {about['dtype']} {shape}")
            raw = bytearray(body[start:end])
            flat = torch.frombuffer(raw, dtype=torch.uint8).view(dtype) if raw else torch.empty(0, dtype=dtype)
            found[key] = flat.view(shape)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{name} is no file of tensors: {error}") from error
    return found
