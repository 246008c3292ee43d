"""Which files an input means, and their bytes: decompressed, in blocks of whole lines, one block in memory at a time.

What the lines mean is decided in `raw_rows`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import zstandard

from gba_hvd.data.recipe import Format
from gba_hvd.errors import BadInput

BLOCK_BYTES = 4 << 20
BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20
_READ_BYTES = 256 << 10
# Handed to a decompressor at once, so that what comes out is bounded however well it was packed: a byte of zstd can
# become 32 KiB (four bytes a block of 128 KiB), a byte of gzip 1 KiB.
_ZSTD_STEP_BYTES, _GZIP_STEP_BYTES = 1 << 10, 32 << 10
_SUFFIXES = {
    "tsv": {"", ".txt", ".tsv", ".csv", ".dat"},
    "csv": {".csv", ".tsv", ".txt", ".dat"},
    "parquet": {".parquet", ".pq"},
    "jsonl": {"", ".jsonl", ".ndjson", ".json", ".txt"},
}
_COMPRESSED = {".gz", ".zst"}
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_NOT_SUPPORTED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"PAR1": "Parquet"}


@dataclass(frozen=True)
class Block:
    """Whole lines of one file. `first_line` counts from 1, `read_bytes` is how far into the file on disk."""

    data: bytes
    first_line: int
    n_lines: int
    read_bytes: int
    ends_in_line: bool = False  # the file's last line has no line end (one was added to `data`)

    def joined(self, after: Block) -> Block:
        n_lines = self.n_lines + after.n_lines
        return Block(self.data + after.data, self.first_line, n_lines, after.read_bytes, after.ends_in_line)

    def cut(self, line: int) -> tuple[Block, Block]:
        """The lines before `line`, and those from it on."""
        n_before, at = line - self.first_line, 0
        for _ in range(n_before):
            at = self.data.index(b"\n", at) + 1
        return (
            Block(self.data[:at], self.first_line, n_before, self.read_bytes),
            Block(self.data[at:], line, self.n_lines - n_before, self.read_bytes, self.ends_in_line),
        )


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def find_files(inputs: Iterable[Path], *formats: Format) -> list[Path]:
    """The files of some files and folders, folders in sorted order, passing over files of other kinds in them."""
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            fitting = [p for p in inside if any(_belongs(p.relative_to(path), format) for format in formats)]
            if not fitting:
                raise BadInput(f"{path}: {_none_of(formats)}; {_what_is_in(path, inside)}")
            found += fitting
        elif path.exists():
            found.append(path)
        else:
            raise BadInput(f"{path}: no such file or folder")
    for path in found:
        if path.stat().st_size == 0:
            raise BadInput(f"{path}: the file is empty")
    return found


def files_by_split(folder: Path, format: Format) -> dict[str, list[Path]]:
    """What in `folder` is called train, valid and test, with any suffix; {} unless something is called train."""
    named: dict[str, list[Path]] = {}
    for split in ("train", "valid", "test"):
        for path in sorted(p for p in folder.iterdir() if p.name.split(".")[0] == split):
            if path.is_dir() or _belongs(Path(path.name), format):
                named.setdefault(split, []).append(path)
    return named if "train" in named else {}


def _belongs(relative: Path, format: Format) -> bool:
    if any(part.startswith((".", "_")) for part in relative.parts):
        return False
    last = Path(relative.name)
    while last.suffix in _COMPRESSED:
        last = last.with_suffix("")
    # Hadoop's part-00000 and Criteo's day_0 have no suffix.
    return last.suffix in _SUFFIXES[format]


def _none_of(formats: Sequence[Format]) -> str:
    what = f"no {formats[0]} file" if len(formats) == 1 else "no file to prepare"
    suffixes = sorted({suffix or "no suffix" for format in formats for suffix in _SUFFIXES[format]})
    return f"{what} in this folder (looked for {', '.join(suffixes)}, also .gz and .zst)"


def _what_is_in(folder: Path, files: Sequence[Path]) -> str:
    if not files:
        return "the folder is empty"
    shown = ", ".join(str(path.relative_to(folder)) for path in files[:3])
    return f"it has {shown}" + (f" and {len(files) - 3:,} more" if len(files) > 3 else "")


def read_blocks(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The lines of a plain, gzip or zstd file (detected by its first bytes). Raises `BadInput` when cut or damaged."""
    line = 1
    pending = bytearray()
    read_bytes = 0
    try:
        for data, read_bytes in _decompressed(path):
            pending += data
            while len(pending) >= block_bytes:
                end = pending.rfind(b"\n", 0, block_bytes) + 1 or pending.find(b"\n", block_bytes) + 1
                if not end and len(pending) > MAX_LINE_BYTES:
                    too_long = f"no line end within {MAX_LINE_BYTES >> 20} MiB, is this a text file?"
                    raise BadInput(f"{path}, line {line}: {too_long}")
                if not end:
                    break
                block = bytes(pending[:end])
                del pending[:end]
                n_lines = _count_lines(block)
                yield Block(block, line, n_lines, read_bytes)
                line += n_lines
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        at = line + pending.count(b"\n")
        raise BadInput(
            f"{path}, line {at}: the compressed file is cut or damaged here ({error}); the rows after it are lost, "
            "so nothing was written: fetch the file again, or repack what can be read of it"
        ) from error
    if pending:
        whole = pending.endswith(b"\n")
        rest = bytes(pending) + (b"" if whole else b"\n")
        yield Block(rest, line, _count_lines(rest), read_bytes, ends_in_line=not whole)


def _count_lines(data: bytes) -> int:
    return int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n")))  # five times as fast as bytes.count


def _decompressed(path: Path) -> Iterator[tuple[bytes, int]]:
    with path.open("rb") as file:
        start = file.read(_READ_BYTES)
        for magic, name in _NOT_SUPPORTED.items():
            if start.startswith(magic):
                raise BadInput(f"{path}: this is a {name} file, expected text, plain or packed with gzip or zstd")
        packed = chain([start], iter(partial(file.read, _READ_BYTES), b""))
        if start.startswith(_GZIP):
            chunks = _unpack(packed, lambda: zlib.decompressobj(wbits=31), _GZIP_STEP_BYTES)
        elif start.startswith(_ZSTD):
            chunks = _unpack(packed, lambda: zstandard.ZstdDecompressor().decompressobj(), _ZSTD_STEP_BYTES)
        else:
            chunks = packed
        for chunk in chunks:
            yield chunk, file.tell()


def _unpack(packed: Iterator[bytes], new_member: Callable[[], _Decompressor], step_bytes: int) -> Iterator[bytes]:
    """Both formats allow several members (zstd: frames) one after another; the last one must reach its end.

    Yields about _READ_BYTES or what one step of `step_bytes` becomes, never more than both.
    """
    found: list[bytes] = []
    member, inside = new_member(), False
    for piece in (chunk[i : i + step_bytes] for chunk in packed for i in range(0, len(chunk), step_bytes)):
        rest = piece
        while rest:
            if not inside and not (rest := rest.lstrip(b"\0")):  # some tools pad with zeros
                break
            found.append(member.decompress(rest))
            inside, rest = not member.eof, member.unused_data
            if sum(map(len, found)) >= _READ_BYTES:
                yield b"".join(found)
                found = []
            if not inside:
                member = new_member()
    if found:
        yield b"".join(found)
    if inside:
        raise EOFError("the stream has no end")
