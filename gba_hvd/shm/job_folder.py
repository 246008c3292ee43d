"""The job's folder on a host: its name, and whether it may be trusted.

A server imports what a file of this folder names, and workers write where its links point. So only the job's user
(and root) may be able to change an entry of it. That holds where three things do, and they are checked by every process
before it opens the first file:

    the folder     is a directory and no link, belongs to this user, and is closed to all others: no other user puts a
    file in its base       cannot be written by others, or is sticky (as /dev/shm is): no other user puts a folder in
    its place its name       is a job's: `x/../../y` names no folder that is ours to remove

The owner of the base is trusted.

A folder of such a name may also be the user's own, such as a clone `gba-hvd-main`. A job makes `door` in its folder
before any other file, and `faults` is the only folder in it; who removes a folder looks at that (`foreign`).
"""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import re
import stat
from pathlib import Path

from gba_hvd.config import checked_job_id
from gba_hvd.errors import ShardMemoryError

PREFIX = "gba-hvd-"
_MADE = re.compile(
    r"(door|alive|keeper|shards|memory\.json|owner|job\.json|progress|kept|not-kept|key|ps\.json|ended-\d+\.json"
    r"|outbox-\d+-\d+|ps-\d+\.\w+(\.residuals)?|faults|fault-\d+-\w+\.json)(\.new(-\d+)*)?"
)


def job_folder(base: Path, job_id: str) -> Path:
    """Raises BadInput for a name that is none of a job: it may come from a checkpoint or from another host."""
    return base / f"{PREFIX}{checked_job_id(job_id)}"


def make(folder: Path) -> None:
    """Make a job's folder, and its base, where they are not there. Raises ShardMemoryError, where the base cannot be
    trusted, and OSError. Whether the folder can, `check` says.
    """
    if folder.parent.exists() and not folder.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    folder.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    _check_base(folder.parent)
    with contextlib.suppress(FileExistsError):  # `check` says what is there
        folder.mkdir(mode=0o700)


def check(folder: Path) -> None:
    """Raises ShardMemoryError where another user could change what is in the folder; FileNotFoundError: it is gone."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ShardMemoryError(_distrust(folder, os.lstat(folder)) or f"{folder}: {error.strerror}") from error
    try:
        about = os.fstat(fd)
    finally:
        os.close(fd)
    if why := _distrust(folder, about):
        raise ShardMemoryError(why)


def is_ours(folder: Path) -> bool:
    """Whether `check` has nothing against it, and it is there."""
    try:
        check(folder)
    except OSError:
        return False
    return True


def foreign(folder: Path, is_whole: bool = True) -> str:
    """Why a folder is not the memory of a job, or has more in it; empty: it is one. Raises OSError when it is gone.

    is_whole: `door` has to be there, which a removal may have taken already
    """
    with os.scandir(folder) as entries:
        found = sorted(entries, key=lambda entry: entry.name)
    if is_whole and not any(entry.name == "door" for entry in found):
        return "it has no file `door`, which a job makes first"
    for entry in found:
        is_kind = entry.is_dir(follow_symlinks=False) == (entry.name == "faults") and not entry.is_symlink()
        if not _MADE.fullmatch(entry.name) or not is_kind:
            return f"it has {entry.name!r}, which no job makes"
        if entry.name == "faults" and (why := foreign(Path(entry.path), is_whole=False)):
            return why.replace("'", "'faults/", 1)
    return ""


def refuse_foreign(folder: Path) -> None:
    """Raises ShardMemoryError where the folder is not empty and no job made it: a job removes its folder in the end."""
    if (why := foreign(folder, is_whole=False)) and not (folder / "door").exists():
        raise ShardMemoryError(
            f"{folder} is not the memory of a job: {why}. It is left alone: choose another GBA_HVD_JOB_ID or "
            "GBA_HVD_SHARD_DIR"
        )


def _distrust(folder: Path, about: os.stat_result) -> str:
    otherwise = "or choose another GBA_HVD_JOB_ID or GBA_HVD_SHARD_DIR"
    if stat.S_ISLNK(about.st_mode):
        return f"{folder} is a symbolic link; a job's folder has to be a folder: remove the link, {otherwise}"
    if not stat.S_ISDIR(about.st_mode):
        return f"{folder} is not a folder but a file of {_user(about.st_uid)}: have it removed, {otherwise}"
    if about.st_uid != os.geteuid():
        return (
            f"{folder} belongs to {_user(about.st_uid)}, this process runs as {_user(os.geteuid())}: run as that user, "
            f"or, if this is your job, have the folder removed {otherwise}"
        )
    if about.st_mode & 0o077:
        return (
            f"{folder} is open to other users (mode {stat.S_IMODE(about.st_mode):o}), who could have changed what is "
            f"in it: remove it (rm -r {folder}), {otherwise}; if the mode comes back, {folder.parent} has a "
            "default ACL (setfacl -k removes it)"
        )
    return ""


def _check_base(base: Path) -> None:
    """Raises ShardMemoryError where others can rename what is in the base. A user's private group is allowed."""
    about = os.stat(base)
    others = about.st_mode & stat.S_IWOTH
    group = about.st_mode & stat.S_IWGRP and not _is_private(about.st_gid)
    if about.st_mode & stat.S_ISVTX or not (others or group):
        return
    who = "everybody" if others else f"the members of group {_group(about.st_gid)}"
    raise ShardMemoryError(
        f"{who} can replace folders in {base} (mode {stat.S_IMODE(about.st_mode):o}), the job's folder among them: "
        f"chmod +t {base} lets them share it without that, chmod go-w {base} keeps them out; or name a folder of your "
        "own with GBA_HVD_SHARD_DIR"
    )


def _is_private(gid: int) -> bool:
    """Whether a group is the private one of this user: it has the user's name, and no other member."""
    try:
        user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:  # a container without a user database
        return gid == os.geteuid()
    return group.gr_name == user and set(group.gr_mem) <= {user}


def _user(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
