"""What was encoded is what is decoded, bit for bit; and nothing else is ever decoded."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from recovery.errors import BadInput, Damaged
from recovery.format.manifest import Section, StateBlob
from recovery.format.row_codec import (
    Encoded,
    Encoding,
    check_state,
    checksum,
    decode_rows,
    decode_state,
    encode_rows,
    encode_state,
)
from recovery.rows import Column, Table

TABLE = Table("user", 1000, (Column("weight", 5), Column("sum", 5), Column("step", 1)))
SHARDS = 3
ENCODINGS = [Encoding(), Encoding(level=0), Encoding(level=1, least_gain=0), Encoding(bits=8), Encoding(bits=4)]


def trained(n_rows: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    records = rng.normal(0, 0.05, (n_rows, TABLE.width)).astype(np.float32)
    records[:, 5:] = rng.gamma(0.5, 1e-3, (n_rows, TABLE.width - 5))
    return records


def section_of(encoded: Encoded, n_rows: int, first: int | None = None, shard: int = 1) -> Section:
    return Section(
        0, shard, n_rows, first, 7, 0, encoded.n_bytes, encoded.raw_bytes, encoded.encoding, encoded.checksum
    )


def stored(encoded: Encoded) -> bytes:
    data = b"".join(encoded.pieces)
    assert len(data) == encoded.n_bytes
    return data


def signed(section: Section, data: bytes, **changes: object) -> Section:
    """The section that somebody would write who wants `data` to be believed."""
    return replace(section, n_bytes=len(data), checksum=checksum([data]), **changes)  # type: ignore[arg-type]


# --- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS[:3])
@pytest.mark.parametrize("places", [None, [0], [332], [0, 1, 2], [3, 4, 300], list(range(1, 333, 2))])
def test_rows_come_back_bit_for_bit(encoding: Encoding, places: list[int] | None) -> None:
    n_rows = 40 if places is None else len(places)
    for records in (trained(n_rows), np.zeros((n_rows, TABLE.width), np.float32)):
        encoded = encode_rows(TABLE, records, None if places is None else np.array(places), encoding)
        section = section_of(encoded, n_rows, None if places else 17)
        found_places, found = decode_rows(stored(encoded), section, TABLE, SHARDS)
        assert found.tobytes() == records.tobytes()
        assert found_places.tolist() == (places or list(range(17, 57)))
        assert found_places.dtype == np.int64
        assert encoded.worst_error == 0


@pytest.mark.parametrize("distance", [1, 200, 60_000, 3_000_000_000, 2**40])
def test_distances_between_places_take_as_many_bytes_as_they_need(distance: int) -> None:
    huge = Table("huge", 2**45, (Column("weight", 2),))
    places = np.array([2**44, 2**44 + 1, 2**44 + 1 + distance])
    encoded = encode_rows(huge, np.ones((3, 2), np.float32), places, Encoding(level=0))
    assert encoded.encoding == {1: "d8", 200: "d8", 60_000: "d16", 3_000_000_000: "d32"}.get(distance, "d64") + "+raw"
    found, _ = decode_rows(stored(encoded), section_of(encoded, 3, shard=0), huge, 1)
    assert found.tolist() == places.tolist()


def test_strange_values_come_back_as_they_were() -> None:
    words = np.array([0x7FC00001, 0xFFC12345, 0x7F800000, 0xFF800000, 0x80000000, 1, 0x7F7FFFFF], np.uint32)
    records = np.resize(words, (4, TABLE.width)).view(np.float32)
    for encoding in ENCODINGS:  # with weights that are not finite, quantisation steps back
        encoded = encode_rows(TABLE, records, None, encoding)
        assert "q" not in encoded.encoding
        _, found = decode_rows(stored(encoded), section_of(encoded, 4, 0), TABLE, SHARDS)
        assert found.tobytes() == records.tobytes()


def test_noise_is_neither_compressed_nor_copied_and_zeros_nearly_vanish() -> None:
    noise = np.random.default_rng(0).integers(0, 2**32, (40_000, 11), dtype=np.uint32).view(np.float32)
    table = replace(TABLE, n_rows=10**6)
    encoded = encode_rows(table, noise)
    assert encoded.encoding == "raw" and encoded.n_bytes == noise.nbytes
    assert np.shares_memory(np.frombuffer(encoded.pieces[0], np.uint8), noise)
    encoded = encode_rows(table, np.zeros_like(noise))
    assert encoded.encoding == "zstd" and encoded.n_bytes < noise.nbytes / 1000


def test_state_comes_back_bit_for_bit() -> None:
    for data in (b"", b"x", bytes(100_000), np.random.default_rng(0).bytes(100_000)):
        encoded = encode_state(data)
        blob = StateBlob("blobs/1", encoded.n_bytes, encoded.raw_bytes, encoded.encoding, encoded.checksum)
        assert decode_state(stored(encoded), blob) == data
        assert encoded.n_bytes <= len(data)


# --- quantisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "share"), [(8, (8 + 5 + 24) / 44), (4, (8 + 3 + 24) / 44)])
def test_quantised_weights_are_within_half_a_step_of_their_row_and_slots_are_exact(bits: int, share: float) -> None:
    records = trained(300)
    records[0, :5] = 0.25  # a row of equal weights
    encoded = encode_rows(TABLE, records, np.arange(300), Encoding(level=0, bits=bits))
    assert encoded.encoding == f"d8+q{bits}"
    places, found = decode_rows(stored(encoded), section_of(encoded, 300), TABLE, SHARDS)
    assert places.tolist() == list(range(300))
    assert found[:, 5:].tobytes() == records[:, 5:].tobytes()
    error = np.abs(found[:, :5] - records[:, :5])
    half_step = np.ptp(records[:, :5], axis=1, keepdims=True) / (2**bits - 1) / 2
    assert (error <= half_step * 1.001 + 1e-8).all()
    assert error.max() == encoded.worst_error > 0
    assert (found[0] == records[0]).all()
    assert encoded.raw_bytes == pytest.approx(share * records.nbytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=5, max_size=5))
def test_any_row_survives_quantisation(bits: int, weights: list[float]) -> None:
    records = np.array([weights + [1.0] * 6], np.float32)
    encoded = encode_rows(TABLE, records, None, Encoding(bits=bits))
    _, found = decode_rows(stored(encoded), section_of(encoded, 1, 0), TABLE, SHARDS)
    if "q" in encoded.encoding:
        assert np.isfinite(found).all()
        smallest = float(np.finfo(np.float32).smallest_subnormal)  # a scale below it cannot be said more exactly
        limit = np.ptp(records[:, :5].astype(np.float64)) / 14 + 2**bits * smallest
        assert np.abs(found.astype(np.float64) - records).max() <= limit
    else:
        assert (found == records).all()


# --- damage ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_flipped_bit_and_every_missing_byte_is_noticed(encoding: Encoding) -> None:
    records = trained(3)
    encoded = encode_rows(TABLE, records, np.array([1, 2, 9]), encoding)
    data, section = stored(encoded), section_of(encoded, 3)
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged, match=r"blobs/7, section at byte 0 .*'user', shard 1.*checksum"):
            decode_rows(bytes(changed), section, TABLE, SHARDS, "blobs/7")
    for length in range(len(data)):
        with pytest.raises(Damaged, match=f"{len(data)} bytes were saved, {length} are there"):
            decode_rows(data[:length], section, TABLE, SHARDS)


CHANGES = {
    "more rows than the shard has": {"n_rows": 400},
    "no rows": {"n_rows": 0},
    "fewer rows than bytes": {"n_rows": 2},
    "a size that does not follow": {"raw_bytes": 10**15},
    "rows that are consecutive after all": {"first": 4},
    "an encoding from elsewhere": {"encoding": "d8+lz4"},
    "an encoding that is not done": {"encoding": "d8+zstd"},
    "wider places": {"encoding": "d64+raw"},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_a_section_that_makes_no_sense_is_not_decoded(change: dict[str, object]) -> None:
    encoded = encode_rows(TABLE, trained(3), np.array([1, 2, 9]), Encoding(level=0))
    section = replace(section_of(encoded, 3), **change)  # type: ignore[arg-type]
    with pytest.raises(Damaged):
        decode_rows(stored(encoded), section, TABLE, SHARDS)


@pytest.mark.parametrize(
    ("first", "distances"),
    [
        (333, [1, 1]),  # the shard has 333 rows
        (1, [0, 5]),  # the same row twice
        (1, [5, 2**64 - 3]),  # back, by overflow
        (1, [5, 2**63]),
        (2**64 - 1, [1, 1]),
        (330, [1, 2]),
    ],
)
def test_places_outside_of_the_shard_or_out_of_order_are_not_decoded(first: int, distances: list[int]) -> None:
    good = encode_rows(TABLE, trained(3), np.array([1, 2, 9]), Encoding(level=0))
    data = np.array([first, *distances], np.uint64).tobytes() + stored(good)[16:]
    section = signed(section_of(good, 3), data, raw_bytes=len(data), encoding="d64+raw")
    with pytest.raises(Damaged, match=r"index|indices"):
        decode_rows(data, section, TABLE, SHARDS)


def test_rows_beyond_the_end_of_the_shard_are_not_decoded() -> None:
    encoded = encode_rows(TABLE, trained(3))
    for first in (331, -1):
        with pytest.raises(Damaged, match="the shard has 333"):
            decode_rows(stored(encoded), section_of(encoded, 3, first), TABLE, SHARDS)


@pytest.mark.slow
def test_a_decompression_bomb_is_refused_before_it_takes_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(1 << 30))
    section = section_of(encode_rows(TABLE, np.zeros((3, 11), np.float32)), 3, 0)
    blob = StateBlob("blobs/bomb", len(bomb), 1 << 30, "zstd", checksum([bomb]))
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="132 bytes expected, the compressed frame has 1073741824"):
            decode_rows(bomb, signed(section, bomb, raw_bytes=132, encoding="zstd"), TABLE, SHARDS)
        with pytest.raises(Damaged, match="3 rows in 'zstd' are 132 bytes"):
            decode_rows(bomb, signed(section, bomb, raw_bytes=1 << 30, encoding="zstd"), TABLE, SHARDS)
        with pytest.raises(Damaged, match="more than the limit"):
            decode_state(bomb, blob, limit_bytes=1 << 20)
        with pytest.raises(Damaged, match="1000 bytes expected"):
            decode_state(bomb, replace(blob, raw_bytes=1000))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", ["no size in the frame", "two frames", "not a frame", "cut off"])
def test_compressed_bytes_that_are_not_one_whole_frame_are_refused(what: str) -> None:
    compressor = zstandard.ZstdCompressor(write_content_size=what != "no size in the frame")
    data = compressor.compress(bytes(132))
    data = {"two frames": data + data, "not a frame": b"\1" * 20, "cut off": data[:-2]}.get(what, data)
    section = section_of(encode_rows(TABLE, np.zeros((3, 11), np.float32)), 3, 0)
    with pytest.raises(Damaged):
        decode_rows(data, signed(section, data, raw_bytes=132, encoding="zstd"), TABLE, SHARDS)


@pytest.mark.slow
@given(st.binary(max_size=200), st.sampled_from(["raw", "zstd", "d8+raw", "d16+zstd", "d64+q8", "q4+zstd"]), st.data())
@settings(max_examples=300)
def test_no_bytes_whatever_do_more_harm_than_to_be_refused(data: bytes, encoding: str, draw: st.DataObject) -> None:
    first = None if encoding.startswith("d") else draw.draw(st.integers(-1, 400))
    n_rows, raw_bytes = draw.draw(st.integers(-1, 5)), draw.draw(st.sampled_from([len(data), 44, 88, 132]))
    section = Section(0, 1, n_rows, first, 7, 0, len(data), raw_bytes, encoding, checksum([data]))
    try:
        places, records = decode_rows(data, section, TABLE, SHARDS)
    except Damaged:
        return
    assert records.shape == (n_rows, TABLE.width) and 0 <= places.min() <= places.max() < 333


@pytest.mark.parametrize("bad", [{"level": 20}, {"level": -51}, {"least_gain": 1.0}, {"least_gain": -0.1}, {"bits": 2}])
def test_settings_without_sense_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(BadInput):
        Encoding(**bad)  # type: ignore[arg-type]


def _state_blobs() -> dict[str, tuple[bytes, StateBlob]]:
    zeros, noise = stored(encode_state(bytes(100_000))), np.random.default_rng(0).bytes(9_000)
    packed = StateBlob("blobs/state", len(zeros), 100_000, "zstd", checksum([zeros]))
    raw = StateBlob("blobs/state", 9_000, 9_000, "raw", checksum([noise]))
    twice, cut = zeros + zeros, zeros[:-3]
    return {
        "packed": (zeros, packed),
        "raw": (noise, raw),
        "cut": (cut, packed),
        "altered": (zeros[:-1] + b"?", packed),
        "cut when it was saved": (cut, replace(packed, n_bytes=len(cut), checksum=checksum([cut]))),
        "two frames": (twice, replace(packed, n_bytes=len(twice), checksum=checksum([twice]), raw_bytes=200_000)),
        "more than it says": (zeros, replace(packed, raw_bytes=99_999)),
        "less than it says": (zeros, replace(packed, raw_bytes=100_001)),
        "no frame": (noise, replace(raw, encoding="zstd")),
        "of another length": (noise, replace(raw, raw_bytes=9_001)),
        "of rows": (noise, replace(raw, encoding="q8+zstd")),
        "beyond the limit": (zeros, replace(packed, raw_bytes=1 << 40)),
    }


@pytest.mark.parametrize("what", _state_blobs())
@pytest.mark.parametrize("size", [7, 1 << 20])
def test_a_state_is_checked_in_pieces_as_it_is_decoded(what: str, size: int) -> None:
    data, blob = _state_blobs()[what]
    outcomes = []
    for act in (
        lambda: decode_state(data, blob),
        lambda: check_state([data[at : at + size] for at in range(0, len(data), size)], blob),
    ):
        try:
            act()
        except Damaged:
            outcomes.append(False)
        else:
            outcomes.append(True)
    assert outcomes == [what in ("packed", "raw")] * 2


@pytest.mark.slow
def test_a_state_is_checked_in_little_memory() -> None:
    """That of the test would become 256 MB."""
    size = 1 << 28
    data = zstandard.ZstdCompressor(level=1).compress(bytes(size))
    blob = StateBlob("blobs/state", len(data), size, "zstd", checksum([data]))
    tracemalloc.start()
    try:
        check_state([data], blob)
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
