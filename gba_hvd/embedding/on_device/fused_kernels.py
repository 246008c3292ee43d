"""Kernels for GPUs, in Triton, which torch's builds for CUDA bring with them. See `fused`, which imports this.

Positions are those of sorted keys. A run is the positions of one key; runs are summed in chunks of CHUNK positions, and
a run's chunks are added up at its first position, in their order: the result does not depend on what runs beside it.
"""

from __future__ import annotations

from typing import Any

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

SGD: Any = tl.constexpr(0)
ADAGRAD: Any = tl.constexpr(1)
ROW_ADAGRAD: Any = tl.constexpr(2)
ADAM: Any = tl.constexpr(3)


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator,unused-ignore]
def sum_chunks(keys, order, grads, sums, counts, n, DIM: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """sums, counts: at the first position of a run in each chunk, of its positions there. WIDE: at least DIM, 2**k"""
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    columns = tl.arange(0, WIDE)
    is_there = at < n
    key = tl.load(keys + at, mask=is_there, other=-1)
    row = tl.load(order + at, mask=is_there, other=0)
    is_number = is_there[:, None] & (columns < DIM)[None, :]
    grad = tl.load(grads + row[:, None] * DIM + columns[None, :], mask=is_number, other=0.0)
    same = key[:, None] == key[None, :]
    # (A gradient that is not finite spoils its chunk: such a step is not applied.)
    total = tl.dot(same.to(tl.float32), grad, input_precision="ieee")
    is_first = is_there & ((tl.load(keys + at - 1, mask=is_there & (at > 0), other=-1) != key) | (at % CHUNK == 0))
    tl.store(sums + at[:, None] * DIM + columns[None, :], total, mask=is_number & is_first[:, None])
    tl.store(counts + at, tl.sum(same.to(tl.int32), 1), mask=is_first)


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator,unused-ignore]
def update(  # type: ignore[no-untyped-def]
    keys, sums, counts, weights, rest, accesses, n, scale, lr, decay, eps, beta1, left1, beta2, left2, root2,
    RULE: tl.constexpr, COUNTS: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """The row optimizer's step of each row. weights [rows, DIM]; rest [rows, REST]: slots, then accesses, an int32.

    accesses: the same memory as rest. Of Adam: left1 = 1 - beta1, left2 = 1 - beta2, root2: of its second correction;
    its first one is in lr
    """
    at = tl.program_id(0).to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    columns = tl.arange(0, WIDE)
    is_there = at < n
    key = tl.load(keys + at, mask=is_there, other=-1)
    is_first = is_there & (tl.load(keys + at - 1, mask=is_there & (at > 0), other=-1) != key)
    is_number = is_first[:, None] & (columns < DIM)[None, :]
    grad = tl.load(sums + at[:, None] * DIM + columns[None, :], mask=is_number, other=0.0)
    count = tl.load(counts + at, mask=is_first, other=0)
    # The run at the end may have more chunks after this one, of which CHUNK are read at once.
    last = tl.max(tl.where(at % CHUNK == CHUNK - 1, key, -1), 0)
    is_last = is_first & (key == last)
    chunk = (tl.program_id(0).to(tl.int64) + 1 + tl.arange(0, CHUNK)) * CHUNK
    is_more = (chunk < n) & (tl.zeros([CHUNK], tl.int32) + tl.max(is_last.to(tl.int32), 0) > 0)
    is_more = is_more & (tl.load(keys + chunk, mask=is_more, other=-1) == last)
    more, n_more = tl.zeros([WIDE], tl.float32), tl.sum(tl.zeros([CHUNK], tl.int32), 0)
    while tl.max(is_more.to(tl.int32), 0) > 0:
        here = is_more[:, None] & (columns < DIM)[None, :]
        more += tl.sum(tl.load(sums + chunk[:, None] * DIM + columns[None, :], mask=here, other=0.0), 0)
        n_more += tl.sum(tl.load(counts + chunk, mask=is_more, other=0), 0)
        chunk += CHUNK * CHUNK
        is_more = is_more & (chunk < n)
        is_more = is_more & (tl.load(keys + chunk, mask=is_more, other=-1) == last)
    grad += tl.where(is_last[:, None], more[None, :], 0.0)
    count += tl.where(is_last, n_more, 0)
    row = key.to(tl.int64)
    of_weight = weights + row[:, None] * DIM + columns[None, :]
    weight = tl.load(of_weight, mask=is_number, other=0.0)
    grad = grad * scale + decay * weight
    of_slot = rest + row[:, None] * REST + columns[None, :]
    if RULE == SGD:
        weight -= lr * grad
    elif RULE == ADAGRAD:
        slot = tl.load(of_slot, mask=is_number, other=0.0) + grad * grad
        tl.store(of_slot, slot, mask=is_number)
        weight -= tl.div_rn(lr * grad, tl.sqrt_rn(slot) + eps)
    elif RULE == ROW_ADAGRAD:
        of_row = rest + row * REST
        whole = tl.load(of_row, mask=is_first, other=0.0) + tl.sum(tl.where(is_number, grad * grad, 0.0), 1) / DIM
        tl.store(of_row, whole, mask=is_first)
        weight -= tl.div_rn(lr * grad, tl.sqrt_rn(whole)[:, None] + eps)
    else:
        first = beta1 * tl.load(of_slot, mask=is_number, other=0.0) + left1 * grad
        second = beta2 * tl.load(of_slot + DIM, mask=is_number, other=0.0) + left2 * grad * grad
        tl.store(of_slot, first, mask=is_number)
        tl.store(of_slot + DIM, second, mask=is_number)
        weight -= tl.div_rn(lr * first, tl.div_rn(tl.sqrt_rn(second), root2) + eps)
    tl.store(of_weight, weight, mask=is_number)
    of_count = accesses + row * REST + REST - 1
    before = tl.load(of_count, mask=is_first, other=0)
    tl.store(of_count, before + (count if COUNTS else 1), mask=is_first)


@triton.jit(do_not_specialize=["n"])  # type: ignore[untyped-decorator,unused-ignore]
def write(  # type: ignore[no-untyped-def]
    keys, weights, rest, host, n, n_shards, region, group_at,
    DIM: tl.constexpr, REST: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write the records of these keys to the host's memory. As many programs as may run beside other kernels.

    weights, rest, host: as int32, since a number of accesses taken for a float32 may be rounded to 0
    """
    words = tl.arange(0, WIDE)
    for block in range(tl.program_id(0), tl.cdiv(n, CHUNK), tl.num_programs(0)):
        at = block * CHUNK + tl.arange(0, CHUNK)
        is_there = at < n
        key = tl.load(keys + at, mask=is_there, other=-1)
        is_first = is_there & (tl.load(keys + at - 1, mask=is_there & (at > 0), other=-1) != key)
        row = key.to(tl.int64)[:, None]
        is_weight = is_first[:, None] & (words < DIM)[None, :]
        is_rest = is_first[:, None] & ((words >= DIM) & (words < DIM + REST))[None, :]
        record = tl.load(weights + row * DIM + words[None, :], mask=is_weight, other=0)
        record += tl.load(rest + row * REST + words[None, :] - DIM, mask=is_rest, other=0)
        place = row % n_shards * region + group_at + row // n_shards * (DIM + REST)
        tl.store(host + place + words[None, :], record, mask=is_weight | is_rest)
