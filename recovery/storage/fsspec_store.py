"""Any fsspec file system as a store: S3, Google, Azure, SFTP, memory.

Each call is one attempt; trying again and time limits are in `retry`; an attempt that took too long is cancelled
where the back end is asynchronous (S3, Google, Azure), so that it uploads no more. What an error of a back end means is
decided here: nothing there, mend your settings, or wait and try again. No transaction and no rename of fsspec is relied
on (they are not atomic): an object is passed completely, under a fresh name.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from recovery.errors import BadInput, NotFound, StoreError
from recovery.redaction import redacted
from recovery.storage.store import ATTEMPT, Transient, checked, checked_prefix, stop_if_cancelled

PACKAGES = {
    "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "abfss": "adlfs", "az": "adlfs",
    "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol", "oss": "ossfs", "oci": "ocifs", "hdfs": "pyarrow",
}  # fmt: skip
_WITH_FOLDERS = ("sftp", "ssh", "smb", "hdfs", "ftp", "webhdfs")
_WITH_BUCKETS = ("s3", "s3a")  # `info` of a bucket distinguishes an empty one from none
_CREDENTIALS = "set the back end's usual variables (S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; "
_CREDENTIALS += "Google: GOOGLE_APPLICATION_CREDENTIALS; Azure: AZURE_STORAGE_CONNECTION_STRING) or storage options"
_REFUSED = ("Credential", "TokenRetrieval", "Authentication", "UnauthorizedSSO", "RefreshError")  # parts of class names
_FOR_GOOD = (PermissionError, IsADirectoryError, NotADirectoryError, ValueError, TypeError, NotImplementedError)


class FsspecStore:
    """Nothing is read or written when it is constructed.

    Raises BadInput when no back end serves the URL, or its package is missing.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self.url = redacted(url).rstrip("/")  # it goes to logs
        self._protocol = url.partition("://")[0]
        self._fs, root = _open(url, self._protocol, dict(storage_options or {}))
        self._root = root.rstrip("/")
        self._find_options = {"on_error": "raise"} if _omits_errors(self._fs) else {}

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        path = self._path(name)
        with self._explained(f"{name} cannot be written", missing=self._no_bucket):
            if self._protocol in _WITH_FOLDERS:
                self._do("makedirs", path.rpartition("/")[0], exist_ok=True)
            self._do("pipe_file", path, b"".join(pieces))

    def get(self, name: str, start: int = 0, n_bytes: int | None = None) -> bytes:
        path = self._path(name)
        if n_bytes == 0:
            return b""
        with self._explained(f"{name} cannot be read"):
            if start == 0 and n_bytes is None:
                return bytes(self._do("cat_file", path))
            end = None if n_bytes is None else start + n_bytes
            try:
                return bytes(self._do("cat_file", path, start=start, end=end))
            except FileNotFoundError:
                raise
            except Exception:
                if start >= self._do("size", path):  # then S3 has no answer but an error
                    return b""
                raise

    def names(self, prefix: str) -> dict[str, int]:
        within = f"{self._root}/{checked_prefix(prefix).rpartition('/')[0]}".rstrip("/")
        with self._explained(_unlisted(prefix), missing=self._no_bucket):
            self._fs.invalidate_cache()  # other writers' objects, too, must be seen
            try:
                found = self._do("find", within, detail=True, **self._find_options)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) and error.errno not in (errno.ENOENT, errno.ENOTDIR):
                    raise
                found = {}
            if not found:
                self._require_bucket()
            if any(info.get("size") is None for info in found.values()):
                raise ValueError(f"listings of {self._protocol}:// do not have the sizes of objects")
        sizes = {path.strip("/")[len(self._root.strip("/")) + 1 :]: info["size"] for path, info in found.items()}
        return {name: int(size) for name, size in sizes.items() if name.startswith(prefix)}

    @property
    def _no_bucket(self) -> str:
        return f"{self._root.split('/')[0]!r} does not exist"

    def _require_bucket(self) -> None:
        """Raises FileNotFoundError where there is no bucket: back ends list it as an empty one."""
        if self._protocol in _WITH_BUCKETS:
            with contextlib.suppress(PermissionError):  # who may list may not ask this
                self._do("info", self._root.split("/")[0])

    def delete(self, names: Sequence[str]) -> None:
        for name, path in [(name, self._path(name)) for name in names]:
            with self._explained(f"{name} cannot be deleted"), contextlib.suppress(FileNotFoundError, KeyError):
                self._do("rm_file", path)

    def _do(self, what: str, *args: Any, **more: Any) -> Any:
        """Call a method of the file system, so that cancelling this thread's attempt ends it, if it can be ended."""
        attempt, coroutine = ATTEMPT.get(), getattr(self._fs, f"_{what}", None)
        if attempt is None or not self._fs.async_impl or coroutine is None:
            return getattr(self._fs, what)(*args, **more)
        stop_if_cancelled(f"{self.url}: {what}")
        future = asyncio.run_coroutine_threadsafe(coroutine(*args, **more), self._fs.loop)
        attempt.on_cancel(future.cancel)
        return future.result()

    def _path(self, name: str) -> str:
        return f"{self._root}/{checked(name)}"

    @contextlib.contextmanager
    def _explained(self, what: str, missing: str = "there is no such object") -> Iterator[None]:
        """Turn any error of a back end into NotFound, StoreError (for good) or Transient."""
        what = f"{self.url}: {what}"
        try:
            yield
        except FileNotFoundError as error:
            raise NotFound(f"{what}: {missing}") from error
        except _FOR_GOOD as error:
            words, advice = _words(error), ""
            if isinstance(error, PermissionError):
                words, advice = words.rstrip("."), f". The credentials are wrong or lack the permission: {_CREDENTIALS}"
            raise StoreError(f"{what}: {words}{advice}") from error
        except OSError as error:
            kind = StoreError if error.errno in (errno.ENOSPC, errno.EROFS, errno.EDQUOT) else Transient
            raise kind(f"{what}: {_words(error)}") from error
        except Exception as error:
            if any(word in cause for cause in _causes(error) for word in _REFUSED):
                raise StoreError(f"{what}: no valid credentials ({_words(error)}); {_CREDENTIALS}") from error
            raise Transient(f"{what}: {_words(error)}") from error


def _unlisted(prefix: str) -> str:
    """prefix: the name of one object, whose presence is asked for; or a folder, with its slash; or all."""
    if prefix and not prefix.endswith("/"):
        return f"whether {prefix} is there cannot be asked"
    return f"{prefix or 'the store'} cannot be listed"


def _omits_errors(fs: Any) -> bool:
    """Whether `find` is fsspec's own walk, for which a folder that cannot be listed is empty unless told otherwise."""
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    if fs.async_impl:
        return type(fs)._find is AsyncFileSystem._find and type(fs)._walk is AsyncFileSystem._walk
    return type(fs).find is AbstractFileSystem.find and type(fs).walk is AbstractFileSystem.walk


def _open(url: str, protocol: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    if protocol not in known_implementations:
        raise BadInput(
            f"{redacted(url)}: protocol {protocol!r} is not known; use a path, s3://, gs://, abfs:// or sftp://"
        )
    try:
        fs, root = fsspec.url_to_fs(url, **{**storage_options, "use_listings_cache": False})
    except ImportError as error:
        package = PACKAGES.get(protocol)
        hint = f"pip install {package}" if package else known_implementations[protocol].get("err", str(error))
        raise BadInput(f"{redacted(url)}: the package for {protocol}:// is not installed: {hint}") from error
    except Exception as error:
        raise BadInput(
            f"{redacted(url)} cannot be opened: {_words(error)}; check the URL and the storage options"
        ) from error
    if not root.strip("/") and protocol != "memory":
        raise BadInput(f"{redacted(url)} names no location: write {protocol}://BUCKET/FOLDER")
    return fs, root


def _words(error: BaseException) -> str:
    return redacted(str(error).strip()) or type(error).__name__


def _causes(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield type(error).__name__
        error = error.__cause__ or error.__context__
