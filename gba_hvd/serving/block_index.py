"""What verifies a part of a shard: checksums of its blocks, and where its keys are. One object has them for all shards.

A shard that is no larger than a block is verified by its own SHA-256, and is not in the index. Of each other one, in
the order of the manifest: the xxh3_64 of each block (uint64), then, where it has keys, the first key of each block that
has some (int64). All little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from gba_hvd.serving.manifest import ModelManifest, Shard
from gba_hvd.serving.stored_bytes import get_verified
from recovery.errors import Damaged
from recovery.storage.store import Store

BLOCK_BYTES = 16 << 10  # a read of a store costs about as much as one of a row, and 8 bytes of memory verify it


@dataclass(frozen=True)
class BlocksOf:
    """Of one shard. checksums: uint64 [n]; first_keys: int64 [m], empty where it has no keys"""

    checksums: np.ndarray
    first_keys: np.ndarray


def index_of(pieces: Sequence[bytes | memoryview], keys: np.ndarray | None) -> bytes:
    """The part of the index of a shard with these bytes; nothing for one of a single block."""
    if sum(map(len, pieces)) <= BLOCK_BYTES:
        return b""
    first_keys = np.empty(0, "<i8") if keys is None else np.ascontiguousarray(keys[:: BLOCK_BYTES // 8], "<i8")
    return np.array(_checksums(pieces), "<u8").tobytes() + first_keys.tobytes()


def read_index(store: Store, manifest: ModelManifest) -> dict[str, BlocksOf]:
    """By the name of a shard; those that are not in it are verified as a whole. Raises Damaged."""
    if manifest.blocks is None:
        return {}
    file, block_bytes = manifest.blocks.file, manifest.blocks.block_bytes
    data = get_verified(store, file)
    found, at = {}, 0
    for _, shard in manifest.shards():
        if shard.n_bytes > block_bytes:
            n, m = n_blocks(shard.n_bytes, block_bytes), n_key_blocks(shard, block_bytes)
            if at + 8 * (n + m) > len(data):
                raise Damaged(f"{store.url}: {file.name} is no index of the shards of {manifest.name}")
            numbers = np.frombuffer(data, "<u8", n, at), np.frombuffer(data, "<i8", m, at + 8 * n)
            found[shard.name], at = BlocksOf(*numbers), at + 8 * (n + m)
    if at != len(data):
        raise Damaged(f"{store.url}: {file.name} is no index of the shards of {manifest.name}")
    return found


def n_blocks(n_bytes: int, block_bytes: int) -> int:
    return -(-n_bytes // block_bytes)


def n_key_blocks(shard: Shard, block_bytes: int) -> int:
    """How many blocks, from the first on, have keys."""
    return n_blocks(8 * shard.n_rows, block_bytes) if shard.has_keys else 0


def _checksums(pieces: Sequence[bytes | memoryview]) -> list[int]:
    found, hashed, left = [], xxhash.xxh3_64(), BLOCK_BYTES
    for piece in pieces:
        view = memoryview(piece)
        while len(view):
            part, view = view[:left], view[left:]
            hashed.update(part)
            left -= len(part)
            if not left:
                found.append(hashed.intdigest())
                hashed, left = xxhash.xxh3_64(), BLOCK_BYTES
    return found if left == BLOCK_BYTES else [*found, hashed.intdigest()]
