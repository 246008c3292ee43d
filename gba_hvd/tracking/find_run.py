"""What a job reported, found by the name that a person gives: a run in MLflow, or records on disk."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from mlflow.exceptions import MlflowException
from sqlalchemy.exc import SQLAlchemyError

from gba_hvd.errors import BadInput
from gba_hvd.tracking.delivery import first_line
from gba_hvd.tracking.mlflow_run import newest_runs, read_history, resolved_uri, run_ids_called
from gba_hvd.tracking.run_history import RunHistory, from_files
from gba_hvd.tracking.spool import default_folder, waiting
from recovery.redaction import redacted


def read(run: str, tracking_uri: str | None) -> RunHistory:
    """The story of a run in MLflow (its id, its job's id, or its name), or of records in a file or folder.

    Raises BadInput when MLflow cannot be read, and when there is no such run, or none of a job; it then names the
    newest ones.
    """
    if not run.strip():
        refuse_no_run(tracking_uri)
    path = Path(run)
    if path.exists():
        return from_files(path)
    uri = resolved_uri(tracking_uri)
    with _in_one_line(uri, run):
        found = read_history(uri, run, lambda key: not key.startswith("system/"))
        known = newest_runs(uri) if found is None or not (found.job_id or found.events) else []
    if found is None:
        raise _not_found(run, uri, known)
    if not found.job_id and not found.events:
        raise BadInput(
            f"run {found.title} of {found.source} was not written by a job: expected one that an `MLflowCallback` "
            f"reports to; the newest runs there are:{_listed(known)}"
        )
    return found


def run_id_of(run: str, tracking_uri: str | None) -> str:
    """The id of a run in MLflow, by its id, its job's id or its name. Raises BadInput as `read`, and for a name of
    several runs."""
    if not run.strip():
        refuse_no_run(tracking_uri)
    uri = resolved_uri(tracking_uri)
    with _in_one_line(uri, run):
        found = run_ids_called(uri, run)
        known = [] if found else newest_runs(uri)
    if not found:
        raise _not_found(run, uri, known)
    if len(found) > 1:
        raise BadInput(f"{len(found)} runs are called {run!r}: name one by its id, newest first: {', '.join(found)}")
    return found[0]


def _not_found(run: str, uri: str, known: list[str]) -> BadInput:
    return BadInput(
        f"no run, job or file is called {run!r} (looked in {redacted(uri)}; --tracking-uri or MLFLOW_TRACKING_URI name "
        f"another store){_waiting(waiting(default_folder(), run))}"
        + (f"; the newest runs there are:{_listed(known)}" if known else "; it holds no runs")
    )


@contextlib.contextmanager
def _in_one_line(uri: str, name: str | None) -> Iterator[None]:
    """Raises BadInput where MLflow cannot be read; it names the spools in which records wait."""
    try:
        yield
    except (BadInput, MlflowException, SQLAlchemyError) as error:
        what = str(error) if isinstance(error, BadInput) else f"{uri} cannot be read: {first_line(error)}"
        spools = waiting(default_folder(), name) or waiting(default_folder(), None)
        raise BadInput(f"{redacted(what)}{_waiting(spools)}") from error


def _waiting(found: list[Path]) -> str:
    """What can be done with spools."""
    if not found:
        return ""
    folder = found[0].parent
    return (
        f"; records that MLflow does not have are in {', '.join(map(str, found[:3]))}{', ...' * (len(found) > 3)}: "
        f"`gba-hvd report {shlex.quote(str(found[0]))}` reads them there, `gba-hvd mlflow send "
        f"{shlex.quote(str(folder))}` sends them"
    )


def _listed(runs: list[str]) -> str:
    return "".join(f"\n  {line}" for line in runs)


def refuse_no_run(tracking_uri: str | None) -> NoReturn:
    """Raises BadInput with the newest runs to choose from."""
    uri = resolved_uri(tracking_uri)
    where = f"{redacted(uri)} (--tracking-uri or MLFLOW_TRACKING_URI name another store)"
    with _in_one_line(uri, None):
        known = newest_runs(uri)
    if not known:
        raise BadInput(
            f"no run is named, and there are none in {where}: gba-hvd report RUN, or a spool file or folder"
            f"{_waiting(waiting(default_folder(), None))}"
        )
    newest = known[0].split()[0]
    raise BadInput(
        f"no run is named: gba-hvd report {newest} is for the newest. The newest in {where}, id, name and job:"
        f"{_listed(known)}"
    )
