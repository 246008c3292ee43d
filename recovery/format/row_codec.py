"""Rows and state as bytes and back: how the sections of a blob are encoded, and what a decoder believes.

A section is, in this order:

    indices  when its rows are not consecutive: the first as uint64, then the distances to the next ones in the
             narrowest unsigned type that holds them all (d8 ... d64), padded with zeros to a multiple of 8 bytes
    records  float32 [n, width]; or, quantised: lowest value and scale of each row's weights (float32 [n] each), codes
             uint8 [n, ceil(w * bits / 8)], slots float32 [n, width - w]. Exact columns (`rows.Column`), such as the
             keys of a keyed table, stand among the float32 numbers as their bits, and only weights are quantised

and the whole of it compressed with zstd when that pays. An encoding is named by what was done: `raw`, `zstd`,
`d16+zstd`, `d8+q4+zstd`.

Trained float32 is mostly noise: zstd takes 5 to 7 % off, at a tenth of the speed of a copy. So a sample decides whether
a section is compressed at all, and the default level is a negative one, which finds zeros and repetitions (untouched
rows, fresh slots) two to three times as fast as level 1 and leaves noise alone. Sorting bytes by significance first is
not done: it brings 4 to 8 % more, and costs a strided copy of everything.

Nothing that is read is trusted. The checksum is compared before a byte is used; no size but the manifest's own is
allocated, and that one must follow from the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import xxhash
import zstandard

from recovery.errors import BadInput, Damaged
from recovery.format.manifest import Section, StateBlob
from recovery.format.quantisation import bytes_of, dequantise, quantise, quantised_bytes
from recovery.rows import Table

Piece = bytes | memoryview

_SAMPLES = 8
_SAMPLE_BYTES = 8 << 10
STATE_LIMIT_BYTES = 16 << 30
_FED_BYTES = 4 << 10  # compressed bytes at a time; they become 128 MiB at most


@dataclass(frozen=True)
class Encoding:
    """Settings.

    level: of zstd, -50 (fastest) to 19 (smallest); 0: never compress.
    least_gain: a section is compressed if that makes it smaller by this share at least.
    bits: 8 or 4: the weights are quantised to so many bits, per row; None: exact.
    """

    level: int = -5
    least_gain: float = 0.1
    bits: int | None = None

    def __post_init__(self) -> None:
        if not -50 <= self.level <= 19:
            raise BadInput(f"level must be within -50 and 19 (0: no compression), got {self.level}")
        if not 0 <= self.least_gain < 1:
            raise BadInput(f"least_gain is a share of the bytes, at least 0 and below 1, got {self.least_gain}")
        if self.bits not in (None, 4, 8):
            raise BadInput(f"bits must be 8, 4 or None (exact), got {self.bits}")


EXACT = Encoding()


@dataclass(frozen=True)
class Encoded:
    """Bytes for a store, and what a `Section` or `StateBlob` must say about them.

    pieces: consecutive. They may be views of the array that was encoded: leave it alone until they are written.
    worst_error: of the weights, through quantisation; 0 when exact.
    """

    pieces: tuple[Piece, ...]
    n_bytes: int
    raw_bytes: int
    encoding: str
    checksum: str
    worst_error: float = 0.0


@dataclass(frozen=True)
class EncodingSteps:
    """What an encoding's name says. delta: bits of a distance between indices; bits: of a weight; None: not done."""

    delta: int | None = None
    bits: int | None = None
    zstd: bool = False

    @property
    def name(self) -> str:
        words = [f"d{self.delta}"] * bool(self.delta) + [f"q{self.bits}"] * bool(self.bits) + ["zstd"] * self.zstd
        return "+".join(words if self.bits or self.zstd else [*words, "raw"])


_ALL = (
    EncodingSteps(delta, bits, zstd)
    for delta in (None, 8, 16, 32, 64)
    for bits in (None, 4, 8)
    for zstd in (False, True)
)
_ENCODINGS = {done.name: done for done in _ALL}


# --- rows ------------------------------------------------------------------------------------------------------------


def encode_rows(
    table: Table, records: np.ndarray, indices: np.ndarray | None = None, encoding: Encoding = EXACT
) -> Encoded:
    """Encode some rows of one table in one shard.

    records: float32 [n, table.width], n at least 1; a contiguous one is not copied unless it is compressed
    indices: int64 [n], ascending, or None when the rows are consecutive

    Weights that are not finite are never quantised: a section that has one is exact.
    """
    assert records.dtype == np.float32 and records.ndim == 2 and records.shape[1] == table.width and len(records)
    done, pieces = EncodingSteps(), list[Piece]()
    if indices is not None:
        assert len(indices) == len(records)
        delta, packed = _pack_indices(indices)
        done, pieces = replace(done, delta=delta), [packed]
    quantised = quantise(records, table.columns[0].width, encoding.bits) if encoding.bits else None
    if quantised is None:
        return _packed([*pieces, bytes_of(records)], done, encoding)
    rows, worst_error = quantised
    return replace(_packed([*pieces, *rows], replace(done, bits=encoding.bits), encoding), worst_error=worst_error)


def decode_rows(
    data: Piece, section: Section, table: Table, n_shards: int, where: str = "a blob"
) -> tuple[np.ndarray, np.ndarray]:
    """(indices int64 [n], records float32 [n, table.width]) of a section; the records may be a view of `data`.

    data: the section's bytes. where: the blob's name, for the message.

    Raises Damaged when they are not those that were saved, or cannot be rows of that shard.
    """
    where = f"{where}, section at byte {section.start} ({table.name!r}, shard {section.shard})"
    done = _done(section.encoding, where)
    n, rows_in_shard = section.n_rows, table.rows_in(section.shard, n_shards)
    if not 1 <= n <= rows_in_shard:
        raise Damaged(f"{where}: {n} rows, the shard has {rows_in_shard}")
    if (done.delta is None) != (section.first is not None):
        raise Damaged(f"{where}: first is {section.first}, but the encoding is {section.encoding!r}")
    weights = table.columns[0].width
    index_bytes = _index_bytes(n, done.delta) if done.delta else 0
    record_bytes = n * (quantised_bytes(weights, table.width, done.bits) if done.bits else table.record_bytes)
    if section.raw_bytes != index_bytes + record_bytes:
        raise Damaged(
            f"{where}: {n} rows in {section.encoding!r} are {index_bytes + record_bytes} bytes, "
            f"the manifest says {section.raw_bytes}"
        )
    raw = _unpacked(data, section, done.zstd, where)
    if section.first is not None:
        if section.first < 0 or section.first + n > rows_in_shard:
            raise Damaged(f"{where}: {n} rows from {section.first} on, the shard has {rows_in_shard}")
        indices = np.arange(section.first, section.first + n, dtype=np.int64)
    else:
        assert done.delta
        indices = _unpack_indices(raw[:index_bytes], n, done.delta, rows_in_shard, where)
    if done.bits:
        return indices, dequantise(raw[index_bytes:], n, weights, table.width, done.bits)
    return indices, np.frombuffer(raw, np.float32, offset=index_bytes).reshape(n, table.width)


# --- state -----------------------------------------------------------------------------------------------------------


def encode_state(data: Piece) -> Encoded:
    """Opaque bytes; compressed if that pays, never quantised. Raises BadInput for more than a restore would read."""
    if len(data) > STATE_LIMIT_BYTES:
        raise BadInput(
            f"the training state has {len(data):,} bytes, a restore reads at most {STATE_LIMIT_BYTES:,}: keep large "
            "tensors in embedding tables, whose rows are saved in pieces, or outside the checkpoint"
        )
    return _packed([data], EncodingSteps(), EXACT)


def decode_state(data: Piece, blob: StateBlob, limit_bytes: int | None = None) -> bytes:
    """The bytes that were saved. Raises Damaged when they are not, or claim to be more than `limit_bytes`."""
    return bytes(_unpacked(data, blob, _is_zstd_state(blob, limit_bytes), blob.name))


def check_state(pieces: Iterable[Piece], blob: StateBlob) -> None:
    """Raises Damaged where `decode_state` would. pieces: the data, consecutive; its raw bytes are only counted."""
    frame = zstandard.ZstdDecompressor().decompressobj() if _is_zstd_state(blob) else None
    hashed, n_bytes, n_raw, flaw = xxhash.xxh3_128(), 0, 0, ""
    for piece in pieces:
        hashed.update(piece)
        n_bytes += len(piece)
        try:
            for start in range(0, len(piece) if frame is not None and not flaw else 0, _FED_BYTES):
                assert frame is not None
                n_raw += len(frame.decompress(piece[start : start + _FED_BYTES]))
                if n_raw > blob.raw_bytes or frame.unused_data:
                    flaw = f"{blob.raw_bytes} bytes expected, it decompresses to more"
                    break
        except zstandard.ZstdError as error:
            flaw = f"cannot be decompressed ({error})"
    if n_bytes != blob.n_bytes:
        raise Damaged(f"{blob.name}: {blob.n_bytes} bytes were saved, {n_bytes} are there")
    if hashed.hexdigest() != blob.checksum:
        raise Damaged(
            f"{blob.name}: the checksum was {blob.checksum} when it was saved, it is {hashed.hexdigest()} now"
        )
    if flaw:
        raise Damaged(f"{blob.name}: {flaw}")
    found = n_bytes if frame is None else n_raw
    if found != blob.raw_bytes or (frame is not None and not frame.eof):
        raise Damaged(f"{blob.name}: {blob.raw_bytes} bytes expected, {found} are in it")


def _is_zstd_state(blob: StateBlob, limit_bytes: int | None = None) -> bool:
    limit_bytes = STATE_LIMIT_BYTES if limit_bytes is None else limit_bytes
    done = _done(blob.encoding, blob.name)
    if done.delta or done.bits:
        raise Damaged(f"{blob.name}: state cannot be encoded as {blob.encoding!r}")
    if blob.raw_bytes > limit_bytes:
        raise Damaged(f"{blob.name}: {blob.raw_bytes} bytes of state, more than the limit of {limit_bytes}")
    return done.zstd


# --- bytes -----------------------------------------------------------------------------------------------------------


def checksum(pieces: Sequence[Piece]) -> str:
    """xxh3_128 of consecutive pieces, hexadecimal."""
    hashed = xxhash.xxh3_128()
    for piece in pieces:
        hashed.update(piece)
    return hashed.hexdigest()


def _packed(pieces: list[Piece], done: EncodingSteps, encoding: Encoding) -> Encoded:
    raw_bytes = sum(len(piece) for piece in pieces)
    compressed = _compressed(pieces, raw_bytes, encoding) if encoding.level else None
    if compressed is not None:
        pieces, done = [compressed], replace(done, zstd=True)
    n_bytes = sum(len(piece) for piece in pieces)
    return Encoded(tuple(pieces), n_bytes, raw_bytes, done.name, checksum(pieces))


def _compressed(pieces: list[Piece], raw_bytes: int, encoding: Encoding) -> bytes | None:
    """None when it does not pay."""
    compressor = zstandard.ZstdCompressor(level=encoding.level)
    largest = memoryview(max(pieces, key=len))
    if len(largest) > 4 * _SAMPLES * _SAMPLE_BYTES:
        starts = range(0, len(largest), len(largest) // _SAMPLES)[:_SAMPLES]
        sample = b"".join(largest[start : start + _SAMPLE_BYTES] for start in starts)
        if len(compressor.compress(sample)) > (1 - encoding.least_gain) * len(sample):
            return None
    found: bytes = compressor.compress(pieces[0] if len(pieces) == 1 else b"".join(pieces))
    return found if len(found) <= (1 - encoding.least_gain) * raw_bytes else None


def _unpacked(data: Piece, about: Section | StateBlob, is_zstd: bool, where: str) -> memoryview:
    if len(data) != about.n_bytes:
        raise Damaged(f"{where}: {about.n_bytes} bytes were saved, {len(data)} are there")
    found = checksum([data])
    if found != about.checksum:
        raise Damaged(f"{where}: the checksum was {about.checksum} when it was saved, it is {found} now")
    if not is_zstd:
        if about.n_bytes != about.raw_bytes:
            raise Damaged(f"{where}: {about.n_bytes} bytes stored, {about.raw_bytes} before, but not compressed")
        return memoryview(data).cast("B").toreadonly()
    try:
        frame = zstandard.get_frame_parameters(data)
        # Compared before anything is allocated: a small frame can claim, and become, any number of bytes.
        if frame.content_size != about.raw_bytes:
            raise Damaged(f"{where}: {about.raw_bytes} bytes expected, the compressed frame has {frame.content_size}")
        raw: bytes = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=about.raw_bytes, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise Damaged(f"{where}: cannot be decompressed ({error})") from error
    if len(raw) != about.raw_bytes:
        raise Damaged(f"{where}: {about.raw_bytes} bytes expected, decompressed to {len(raw)}")
    return memoryview(raw)


def _done(name: str, where: str) -> EncodingSteps:
    if name not in _ENCODINGS:
        raise Damaged(f"{where}: encoding {name!r} is not known")
    return _ENCODINGS[name]


# --- indices ---------------------------------------------------------------------------------------------------------


def _pack_indices(indices: np.ndarray) -> tuple[int, bytes]:
    distances = np.diff(indices)
    assert indices[0] >= 0 and (not len(distances) or distances.min() > 0), "indices must be ascending"
    kind = np.min_scalar_type(int(distances.max()) if len(distances) else 1)
    packed = indices[:1].astype("<u8").tobytes() + distances.astype(kind.newbyteorder("<")).tobytes()
    return 8 * kind.itemsize, packed.ljust(_index_bytes(len(indices), 8 * kind.itemsize), b"\0")


def _index_bytes(n_rows: int, delta: int) -> int:
    return 8 + -(-(n_rows - 1) * delta // 64) * 8


def _unpack_indices(raw: memoryview, n: int, delta: int, rows_in_shard: int, where: str) -> np.ndarray:
    steps = np.empty(n, np.uint64)
    steps[0] = np.frombuffer(raw, "<u8", 1)[0]
    steps[1:] = np.frombuffer(raw, f"<u{delta // 8}", n - 1, offset=8)
    # Each distance is checked, so that a sum beyond 2^64 cannot come out as a good index.
    if steps.max() >= rows_in_shard or (n > 1 and not steps[1:].min()):
        raise Damaged(f"{where}: the indices are not ascending indices of a shard of {rows_in_shard} rows")
    indices = np.cumsum(steps, dtype=np.uint64)
    if indices[-1] >= rows_in_shard or (indices[1:] <= indices[:-1]).any():
        raise Damaged(f"{where}: index {int(indices.max())} is outside of a shard of {rows_in_shard} rows")
    return indices.astype(np.int64)
