"""Values in fewer bits, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gba_hvd.compression import value_codec

EDGES = [
    0x00000000, 0x80000000,  # zeros
    0x00000001, 0x80000001, 0x007FFFFF, 0x00007FFF, 0x00008000, 0x00008001, 0x00018000,  # denormal; at a half
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0xBF808000, 0x3FFFFFFF,  # between two: to the even one
    0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0xFF7FFFFF, 0xFF7F8000,  # the largest, and beyond
    0x7F800000, 0xFF800000,  # infinite
]  # fmt: skip


def encoded(values: np.ndarray) -> np.ndarray:
    return np.frombuffer(value_codec.encode(values, "bf16"), np.uint16)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 15, 16, 17, 33, 1000])
def test_bfloat16_is_rounded_as_torch_rounds_it(n: int) -> None:
    bits = np.random.default_rng(n).integers(0, 2**32, n, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([np.array(EDGES, np.uint32), bits]).view(np.float32)
    values = values[~np.isnan(values)][-n:] if n else values[:0]
    expected = value_codec.to_half(torch.from_numpy(values), torch.bfloat16)
    assert encoded(values).tolist() == expected.view(torch.int16).numpy().view(np.uint16).tolist()
    seen = value_codec.decode(encoded(values).view(np.uint8), "bf16", len(values), np.dtype(np.float32))
    assert seen.tobytes() == expected.to(torch.float32).numpy().tobytes()


def test_bfloat16_at_its_edges_is_as_torch_has_it() -> None:
    values = np.array(EDGES, np.uint32).view(np.float32)
    expected = value_codec.to_half(torch.from_numpy(values), torch.bfloat16)
    assert encoded(values).tolist() == expected.view(torch.int16).numpy().view(np.uint16).tolist()


def test_what_is_no_number_stays_none_in_bfloat16() -> None:
    values = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0x7FFFFFFF, 0x3F800000, 0xFFFFFFFF], np.uint32)
    seen = value_codec.decode(encoded(values.view(np.float32)).view(np.uint8), "bf16", 6, np.dtype(np.float32))
    assert np.isnan(seen).tolist() == [True, True, True, True, False, True]
    assert seen[4] == 1.0
