"""Which files an input means, and their bytes: decompressed, in blocks of whole lines, one block in memory at a time.

What the lines mean is decided in `raw_rows`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import zstandard

from gba_hvd.data.recipe import Format
from gba_hvd.errors import BadInput

SPLITS = ("train", "valid", "test")
BLOCK_BYTES = 4 << 20
BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20
_READ_BYTES = 256 << 10
# Handed to a decompressor at once, so that what comes out is bounded however well it was packed: a byte of zstd can
# become 32 KiB (four bytes a block of 128 KiB), a byte of gzip 1 KiB.
_ZSTD_STEP_BYTES, _GZIP_STEP_BYTES = 1 << 10, 32 << 10
_TEXT = {"", ".txt", ".tsv", ".csv", ".dat"}
_SUFFIXES = {
    "tsv": _TEXT,
    "csv": _TEXT,
    "parquet": {".parquet", ".parq", ".pq"},
    "jsonl": {"", ".jsonl", ".ndjson", ".json", ".txt"},
}
_COMPRESSED = {".gz", ".zst"}
# What stands beside data in a folder: not read, which the summary says.
_README = re.compile(r"(.*[-_ ])?readme(\..*)?|(licen[cs]e|copying)(\..*)?")
_NOTES = {".md", ".rst", ".html", ".pdf", ".json", ".yaml", ".yml", ".py", ".ipynb", ".sh", ".sql", ".md5", ".sha256"}
_N_SHOWN = 3
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


@dataclass(frozen=True)
class Found:
    """The files of an input.

    read:   those with data, in order
    empty:  those without a byte, or with a line end alone
    notes:  in folders, what stands beside data: a README, a schema in JSON. Not read
    others: in folders, all else, which is no data by its name, or a link to no file
    """

    read: list[Path]
    empty: list[Path]
    notes: list[Path]
    others: list[Path]

    def refuse_others(self, format: Format) -> None:
        if self.others:
            raise BadInput(
                f"in the folders of the input, these files are not read: {shown(self.others)}. Expected "
                f"of {format} files: {_endings([format])}. Rename those that are data, pack bzip2 and xz again with "
                "gzip or zstd, move the others elsewhere; or name the files to read in place of their folder"
            )


def find_files(inputs: Iterable[Path], *formats: Format) -> Found:
    """The files that some files and folders mean, folders in sorted order.

    Raises BadInput for what is not there, for a folder without a file of these formats, and where all files are empty.
    """
    found: list[Path] = []
    notes: list[Path] = []
    others: list[Path] = []
    for path in inputs:
        if path.is_dir():
            # Links to folders are not followed, so they count as files that are not read.
            inside = sorted(p for p in path.rglob("*") if p.is_symlink() or not p.is_dir())
            stores = {parent for parent in {p.parent for p in inside} if _is_store(parent)}
            roles = {p: _role(p, path, formats) if stores.isdisjoint(p.parents) else "note" for p in inside}
            if "data" not in roles.values():
                raise BadInput(
                    f"{path}: {_none_of(formats)}; {_what_is_in(path, inside)}. Data under other names: name the files "
                    "themselves, or rename them"
                )
            for role, files in (("data", found), ("note", notes), ("other", others)):
                files += [p for p in inside if roles[p] == role]
        elif path.exists():
            found.append(path)
        else:
            raise BadInput(f"{path}: no such file or folder")
    read: list[Path] = []
    empty: list[Path] = []
    for path in found:
        (empty if _is_blank(path) else read).append(path)
    if found and not read:
        among = f", as are all {len(found):,} of this input" if len(found) > 1 else ""
        raise BadInput(f"{found[0]}: the file is empty{among}; fetch it again, or leave it out")
    return Found(read, empty, notes, others)


def refuse_same_file_twice(files: Iterable[Path]) -> None:
    """Raises BadInput: a row in two splits would be trained and tested, and one that is there twice counts twice."""
    seen: dict[Path, Path] = {}
    for path in files:
        if (first := seen.get(real := path.resolve())) is not None:
            also = "" if first == path else f", also as {first}"
            raise BadInput(
                f"{path}: this file is in the input twice{also}, so its rows would count twice, or be in two splits: "
                "name each file once, and no folder beside files that are in it"
            )
        seen[real] = path


def files_by_split(folder: Path, format: Format) -> tuple[dict[str, list[Path]], list[Path]]:
    """What in `folder` is called train, valid and test, with any suffix, and the notes beside; no splits where nothing
    is. Raises BadInput where there is no train, and where they would leave other files or folders unread."""
    named: dict[str, list[Path]] = {}
    notes: list[Path] = []
    others: list[Path] = []
    for path in sorted(folder.iterdir()):
        split = path.name.split(".")[0].lower()
        role = "note" if _is_store(path) else _role(path, folder, [format])
        if split in SPLITS and (path.is_dir() or role == "data"):
            named.setdefault(split, []).append(path)
        elif role != "hidden":
            (notes if role == "note" else others).append(path)
    if not named:
        return {}, []
    if "train" not in named:
        found = shown([path for paths in named.values() for path in paths])
        raise BadInput(
            f"{folder}: has {found}, and nothing that is called train: name the files of each split with --train, "
            "--valid and --test; or cut all files of the folder with --split 0.8,0.1,0.1"
        )
    if others:
        raise BadInput(
            f"{folder}: has {named['train'][0].name}, so that splits are what is called train, valid and test, and "
            f"these are not read: {shown(others)}. Expected of {format} files: {_endings([format])}. Put several files "
            "of a split into a folder train, valid or test, or name them with --train, --valid and --test; move the "
            "others elsewhere; or cut all files of the folder with --split 0.8,0.1,0.1"
        )
    return {split: named[split] for split in SPLITS if split in named}, notes


def is_hidden(relative: str) -> bool:
    """Whether a path below a folder is of what writers of data keep beside it: `_temporary/0/part-0`, `_SUCCESS`,
    `.part-0.crc`."""
    return relative.endswith(".crc") or any(part.startswith((".", "_")) for part in relative.split("/"))


def _is_blank(path: Path) -> bool:
    """No byte, or a line end or a byte order mark alone."""
    return path.stat().st_size <= len(BOM) + 2 and not path.read_bytes().removeprefix(BOM).strip()


def _is_store(folder: Path) -> bool:
    """Whether `prepare` wrote it, as with an --out in the folder of the input."""
    return (folder / "dataset.json").is_file() and (folder / "vocabulary").is_dir()


def shown(files: Sequence[object]) -> str:
    """The first ones, and how many more there are."""
    more = f" and {len(files) - _N_SHOWN:,} more" if len(files) > _N_SHOWN else ""
    return ", ".join(map(str, files[:_N_SHOWN])) + more


def _role(path: Path, folder: Path, formats: Sequence[Format]) -> Literal["hidden", "note", "data", "other"]:
    if is_hidden(path.relative_to(folder).as_posix()):
        return "hidden"
    last = Path(path.name.lower())
    while last.suffix in _COMPRESSED:
        last = last.with_suffix("")
    if _README.fullmatch(last.name):
        return "note"
    # Hadoop's part-00000 and Criteo's day_0 have no suffix.
    if path.is_file() and any(last.suffix in _SUFFIXES[format] for format in formats):
        return "data"
    return "note" if last.suffix in _NOTES else "other"


def _none_of(formats: Sequence[Format]) -> str:
    what = f"no {formats[0]} file" if len(formats) == 1 else "no file to prepare"
    return f"{what} in this folder (looked for {_endings(formats)})"


def _endings(formats: Sequence[Format]) -> str:
    suffixes = sorted({suffix or "no suffix" for format in formats for suffix in _SUFFIXES[format]})
    return f"{', '.join(suffixes)}, also .gz and .zst"


def _what_is_in(folder: Path, files: Sequence[Path]) -> str:
    if not files:
        return "the folder is empty"
    return f"it has {shown([path.relative_to(folder) for path in files])}"


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
