"""A folder as a store. Each object is one file, which has its name only when it is complete and on the disk.

`put` writes and syncs a hidden file, `.NAME.RANDOM`, and gives it its name by a link, which fails if the name is taken;
where there are no hard links, by a rename that does so, too. It syncs every folder that is new or has a new entry. What
a crash leaves is a hidden file that no listing shows, or the complete object.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from recovery.errors import NotFound, StoreError
from recovery.storage.direct_io import read_blocks, write_blocks
from recovery.storage.rename import rename_new
from recovery.storage.store import checked, checked_prefix, stop_if_cancelled

_PIECES_AT_ONCE = 512  # the kernel takes 1024
_CHUNK_BYTES = 8 << 20
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)  # FAT, some of FUSE
_WHAT_TO_DO = {
    errno.ENOSPC: "the disk is full: free space, keep fewer checkpoints, or name another folder",
    errno.EDQUOT: "the quota is used up: free space, keep fewer checkpoints, or name another folder",
    errno.EFBIG: "the limit on the size of a file is reached: raise it (ulimit -f), or name another folder",
    errno.EROFS: "the file system is read-only: mount it writable, or name another folder",
    errno.EACCES: "permission denied: make the folder writable for this user, or name another one",
    errno.EPERM: "not permitted: make the folder writable for this user, or name another one",
    errno.ENOTDIR: "a part of the path is a file: name another folder",
}


class LocalStore:
    """Constructing touches nothing; the folder is made by the first `put`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.url = str(self.folder)

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        path = self._path(name)
        n_bytes = sum(len(piece) for piece in pieces)
        with _explained(f"{path}: {n_bytes:,} bytes cannot be written"):
            made = _make_folders(path.parent)
            hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            try:
                file = os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
                try:
                    _write_all(file, pieces)
                    os.fsync(file)
                finally:
                    os.close(file)
                stop_if_cancelled(str(path))
                _name(hidden, path)
            except FileExistsError:
                _require_equal(path, pieces)
                return
            finally:
                with contextlib.suppress(OSError):  # also so that a full disk has room for the next attempt
                    hidden.unlink()
            for folder in made:
                sync(folder)

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        path = self._path(name)
        with _explained(f"{path} cannot be read"), _open(path) as file:
            there = max(0, os.fstat(file.fileno()).st_size - start)
            want = there if n_bytes is None else min(n_bytes, there)
            data = os.pread(file.fileno(), want, start)
            while len(data) < want and (more := os.pread(file.fileno(), want - len(data), start + len(data))):
                data += more  # the kernel reads at most 2 GiB at once
            return data

    def read(self, name: str, start: int, n_bytes: int) -> memoryview:
        """As `get`."""
        path = self._path(name)
        with _explained(f"{path} cannot be read"), _open(path) as file:
            found = read_blocks(file.fileno(), start, n_bytes)
        return memoryview(self.get(name, start, n_bytes)) if found is None else found

    def names(self, prefix: str) -> dict[str, int]:
        within = checked_prefix(prefix).rpartition("/")[0]
        found = {}
        with _explained(f"{self.folder} cannot be listed"):
            for path, n_bytes in _files(self.folder / within):
                name = path.relative_to(self.folder).as_posix()
                if name.startswith(prefix):
                    found[name] = n_bytes
        return found

    def delete(self, names: Sequence[str]) -> None:
        folders = set()
        with _explained(f"{self.folder}: objects cannot be deleted"):
            for name in names:
                path = self._path(name)
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                    folders.add(path.parent)
            for folder in folders:
                if folder.parent.name in ("blobs", "claims"):  # of one save; its name never comes again
                    with contextlib.suppress(OSError):
                        for hidden in folder.glob(".*"):
                            hidden.unlink()
                        folder.rmdir()

    def _path(self, name: str) -> Path:
        return self.folder / checked(name)


def _open(path: Path) -> BinaryIO:
    """For reading. Raises StoreError for what is no regular file: opening a pipe would wait for its writer."""
    file = open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise StoreError(f"{path} cannot be read: it is no regular file (a pipe or a device); remove it")
    return file


def _name(hidden: Path, path: Path) -> None:
    """Give a complete object its name. Raises FileExistsError when that is taken."""
    try:
        os.link(hidden, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if not rename_new(hidden, path):
            raise StoreError(
                f"{path}: this file system can neither make hard links ({error.strerror}) nor rename without replacing "
                "(renameat2), so two writers could overwrite each other: name a folder on another one, or an fsspec URL"
            ) from error


def _write_all(file: int, pieces: Sequence[bytes | memoryview]) -> None:
    """One piece after the other, without joining them."""
    views = [view for piece in pieces if len(view := memoryview(piece).cast("B"))]
    if views:
        views[0] = views[0][write_blocks(file, views[0]) :]
    waiting = iter([view for view in views if len(view)])
    batch = list(islice(waiting, _PIECES_AT_ONCE))
    while batch:
        stop_if_cancelled("a write")
        written = os.writev(file, batch)
        while batch and written >= len(batch[0]):
            written -= len(batch.pop(0))
        if written:
            batch[0] = batch[0][written:]
        batch += islice(waiting, _PIECES_AT_ONCE - len(batch))


def _require_equal(path: Path, pieces: Sequence[bytes | memoryview]) -> None:
    """An object of this name is there: then it must be this one, complete."""
    with _open(path) as file:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), _CHUNK_BYTES):
                part = view[start : start + _CHUNK_BYTES]
                if file.read(len(part)) != part:
                    raise StoreError(f"{path}: another object of this name is there already; names are used once")
        if file.read(1):
            raise StoreError(f"{path}: a longer object of this name is there already; names are used once")
        os.fsync(file.fileno())
    sync(path.parent)


def _make_folders(folder: Path) -> list[Path]:
    """Make what is missing; the folders to sync once the file is there, innermost first."""
    missing = [folder]
    while not missing[-1].exists() and missing[-1] != missing[-1].parent:
        missing.append(missing[-1].parent)
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def sync(path: Path) -> None:
    """A file or folder: what is in it survives a crash of the machine from here on."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False) and not entry.name.startswith("."):
            with contextlib.suppress(FileNotFoundError):  # deleted since it was listed
                yield Path(entry.path), entry.stat(follow_symlinks=False).st_size


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except StoreError:
        raise
    except FileNotFoundError as error:
        raise NotFound(f"{what}: there is no such object") from error
    except OSError as error:
        advice = _WHAT_TO_DO.get(error.errno or 0, error.strerror or str(error))
        raise StoreError(f"{what}: {advice}") from error
