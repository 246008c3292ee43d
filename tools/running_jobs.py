"""The jobs of this host: which there are, whom to ask about one, and asking."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.config import Config
from gba_hvd.errors import BadInput, GbaError
from gba_hvd.shm import job_board
from gba_hvd.shm.host_identity import elsewhere
from gba_hvd.shm.job_board import bases_in_use
from gba_hvd.shm.job_folder import is_ours, job_folder

from .folder_argument import shard_folder

if TYPE_CHECKING:
    from gba_hvd.ps.client import Client
    from gba_hvd.ps.messages import Endpoint


_PREFIX = "gba-hvd-"


def find_job(bases: Sequence[Path], job_id: str | None) -> Path:
    """The folder of the job `job_id` on this host (or of the only job of that name), or of the only one.

    bases: where to look, the place for shards first, whose jobs come before others. Raises BadInput when there is none,
    or when there are several to choose from.
    """
    running = [list(_jobs(base)) for base in bases]

    def first(fits: Callable[[Path], bool]) -> list[Path]:
        """In the first folder that has any."""
        return next((found for jobs in running if (found := list(filter(fits, jobs)))), [])

    everywhere = [path for jobs in running for path in jobs]
    looked = ", ".join(map(str, bases))
    if job_id is not None and not job_id.strip():
        raise BadInput(
            f"the job's id or name is empty: expected one that `gba-hvd ps` lists; {_running_here(everywhere)}"
        )
    if job_id is None:
        found = first(lambda path: True)
        if len(found) == 1:
            return found[0]
        if found:
            raise BadInput(f"{len(found)} jobs run on this host, name one with --job: {_listed(found)}")
        raise BadInput(
            f"no job runs here: {looked} holds no live folder {_PREFIX}*; run this on a host of the job, as its user, "
            "and name the folder with --dir if the job has another GBA_HVD_SHARD_DIR"
        )
    if of_the_id := first(lambda path: _id_of(path) == job_id):
        return of_the_id[0]
    named = first(lambda path: _name_of(path) == job_id)
    if len(named) == 1:
        return named[0]
    if named:
        ids = ", ".join(sorted(map(_id_of, named)))
        raise BadInput(f"{len(named)} jobs of the name {job_id!r} run on this host, say which by its id: {ids}")
    dead = False
    near = get_close_matches(job_id, [*map(_id_of, everywhere), *map(_name_of, everywhere)], n=1)
    hint = f"did you mean {near[0]!r}?" if near else _running_here(everywhere)
    with suppress(BadInput):
        dead = any(job_folder(base, job_id).is_dir() for base in bases)
    what = (
        "has no living worker on this host"
        if dead
        else f"does not run here ({looked}; `gba-hvd report` is for runs in MLflow)"
    )
    raise BadInput(f"job {job_id!r} {what}; {hint}")


def _running_here(folders: Sequence[Path]) -> str:
    return f"running here: {_listed(folders) or 'none'}"


def _jobs(base: Path) -> Iterator[Path]:
    """Folders of jobs that have a living worker. Another user's are left out: what is in them is not to be trusted."""
    for path in filter(is_ours, sorted(base.glob(f"{_PREFIX}*"))):
        try:
            fd = os.open(path / "alive", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # every living worker holds it shared
        except BlockingIOError:
            yield path
        finally:
            os.close(fd)


def bases_of(args: argparse.Namespace) -> list[Path]:
    """Where `ps`, `status` and `switch` look: in --dir, or where shards lie and in all other folders in use.

    Raises BadInput where --dir names no folder.
    """
    return [shard_folder(args.dir)] if args.dir else list(dict.fromkeys([_shard_dir(), *bases_in_use()]))


def job_to_change(args: argparse.Namespace) -> Path:
    """As `find_job`; but without --job none in a folder that was not named, and none where jobs run in several."""
    first, *others = bases_of(args)
    elsewhere = [path for base in others for path in _jobs(base)]
    is_named = bool(os.environ.get("GBA_HVD_SHARD_DIR"))  # without others --dir is, too
    if args.job is None and elsewhere and not (is_named and any(_jobs(first))):
        listed = _listed([*_jobs(first), *elsewhere], with_folder=True)
        raise BadInput(f"name a job with --job, or its folder with --dir: {listed}")
    return find_job([first, *others] if args.job is not None else [first], args.job)


def _id_of(folder: Path) -> str:
    return folder.name.removeprefix(_PREFIX)


def _name_of(folder: Path) -> str:
    """What people call the job; empty while it is beginning."""
    report = job_board.read(folder)
    return "" if report is None else str(report["name"])


def with_name(folder: Path) -> str:
    name = _name_of(folder)
    return f"{_id_of(folder)} ({name})" if name else _id_of(folder)


def _listed(folders: Sequence[Path], with_folder: bool = False) -> str:
    """Jobs to choose from: the ids, each with its name; where they are too, if that differs or is asked for."""
    with_folder = with_folder or len({path.parent for path in folders}) > 1
    return ", ".join(with_name(path) + (f" in {path.parent}" if with_folder else "") for path in folders)


def _shard_dir() -> Path:
    return Config.from_env().shard_dir


def _contact(folder: Path, timeout_s: float) -> tuple[Endpoint, int]:
    """The server that knows most: the coordinator in an asynchronous mode, else this host's first server.

    With the number of this host's memory, as the servers count. Raises BadInput when the job has no servers at all.
    """
    import msgspec

    from gba_hvd.ps import launch
    from gba_hvd.ps.messages import Enter

    if not (folder / "ps.json").exists():
        raise BadInput(
            f"job {folder.name.removeprefix(_PREFIX)!r} has no companion server: it was started without a "
            "gba_hvd.GBACallback (or has only just begun), so it is in allreduce mode and stays there"
        )
    try:
        session = msgspec.msgpack.decode((folder / "ps-0.session").read_bytes())
    except FileNotFoundError:
        session = None
    if session is None or session["idle"]:
        return launch.endpoint(folder, 0, 0, timeout_s), 0
    enter = msgspec.convert(session["enter"], Enter)
    return enter.servers[0], enter.servers[enter.me].host


@contextmanager
def connection(folder: Path, timeout_s: float) -> Iterator[Client]:
    """A client whose server 0 is the one to ask."""
    from gba_hvd.ps.client import Client

    endpoint, here = _contact(folder, timeout_s)
    job = json.loads((folder / "ps.json").read_text())["job"]
    client = Client(job, (folder / "key").read_bytes(), [endpoint], here, folder, timeout_s)
    client.start()
    try:
        yield client
    finally:
        client.close()


def running_jobs(bases: Sequence[Path]) -> list[dict[str, Any]]:
    """By name and start: what the boards of living jobs say, and "dir"."""
    found: dict[Path, dict[str, Any]] = {}
    for base in bases:
        for folder in _jobs(base):
            shown = job_board.read(folder) or {"name": "", "job": _id_of(folder), "mode": "beginning"}
            found[folder.resolve()] = {**shown, "dir": str(folder.parent)}
    return sorted(found.values(), key=lambda job: (job["name"], job.get("started_unix_s", 0.0)))


def report_of(folder: Path, timeout_s: float) -> dict[str, Any]:
    """What the job's server reports, and what its board says beside that; of a job without servers, the board alone.

    "container": that its processes are of, where it is another one than this process's
    """
    container = elsewhere(folder)
    return {**_report_of(folder, timeout_s), **({"container": container} if container else {})}


def _report_of(folder: Path, timeout_s: float) -> dict[str, Any]:
    shown = job_board.read(folder)
    if shown is not None and (shown.get("mode") == job_board.ENDING or shown.get("waits_for_servers")):
        return shown  # the job's server is going, or not there yet
    if (folder / "ps.json").exists():
        report = {**(shown or {}), **ask_status(folder, timeout_s), "servers_here": _servers_of(folder)}
        if report["mode"] != "allreduce":
            report.pop("step_times", None)  # it was entered since the board was written
        return report
    if shown is not None:
        return shown
    with _a_job_that_ends(folder):
        os.stat(folder / "alive")
    raise BadInput(f"job {_id_of(folder)!r} is beginning: its workers have not formed a world yet; look again later")


def _servers_of(folder: Path) -> list[dict[str, Any]]:
    """This host's: {"server", "pid", "started_unix_s", "n_restarts"}."""
    from gba_hvd.ps import launch

    return [{"server": index, **asdict(process)} for index, process in launch.processes_of(folder).items()]


def ask_status(folder: Path, timeout_s: float) -> dict[str, Any]:
    """What the server reports: plain values; `mode` is always there."""
    from gba_hvd.ps.messages import Status, StatusReport

    with _a_job_that_ends(folder), connection(folder, timeout_s) as client:
        body = client.call(0, Status()).body
    assert isinstance(body, StatusReport)
    return body.report


def ask_switch(folder: Path, mode: str, reason: str, timeout_s: float) -> None:
    from gba_hvd.ps.messages import SwitchTo

    with _a_job_that_ends(folder), connection(folder, timeout_s) as client:
        client.call(0, SwitchTo(mode, reason, pin=True))


@contextmanager
def _a_job_that_ends(folder: Path) -> Iterator[None]:
    """The folder may go at any moment; each failure then means the same."""
    try:
        yield
    except (GbaError, OSError) as error:
        if folder.exists():
            raise
        raise BadInput(f"job {folder.name.removeprefix(_PREFIX)!r} has just ended") from error


def user_name() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        return "the operator"
