"""What a job reported, found by the name that a person gives: a run in MLflow, or records on disk."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from gba_hvd.errors import BadInput
from gba_hvd.tracking.mlflow_run import newest_runs, read_history, resolved_uri, run_ids_called
from gba_hvd.tracking.run_history import RunHistory, from_files
from recovery.redaction import redacted


def read(run: str, tracking_uri: str | None) -> RunHistory:
    """The story of a run in MLflow (its id, its job's id, or its name), or of records in a file or folder.

    Raises BadInput when there is no such run, or none of a job; it then names the newest ones.
    """
    if not run.strip():
        refuse_no_run(tracking_uri)
    path = Path(run)
    if path.exists():
        return from_files(path)
    uri = resolved_uri(tracking_uri)
    found = read_history(uri, run, lambda key: not key.startswith("system/"))
    if found is None:
        raise _not_found(run, uri)
    if not found.job_id and not found.events:
        raise BadInput(
            f"run {found.title} of {found.source} was not written by a job: expected one that an `MLflowCallback` "
            f"reports to; the newest runs there are:{_listed(newest_runs(uri))}"
        )
    return found


def run_id_of(run: str, tracking_uri: str | None) -> str:
    """The id of a run in MLflow, by its id, its job's id or its name. Raises BadInput as `read`, and for a name of
    several runs."""
    if not run.strip():
        refuse_no_run(tracking_uri)
    uri = resolved_uri(tracking_uri)
    found = run_ids_called(uri, run)
    if not found:
        raise _not_found(run, uri)
    if len(found) > 1:
        raise BadInput(f"{len(found)} runs are called {run!r}: name one by its id, newest first: {', '.join(found)}")
    return found[0]


def _not_found(run: str, uri: str) -> BadInput:
    known = _listed(newest_runs(uri))
    return BadInput(
        f"no run, job or file is called {run!r} (looked in {redacted(uri)}; --tracking-uri or MLFLOW_TRACKING_URI name "
        f"another store)" + (f"; the newest runs there are:{known}" if known else "; it holds no runs")
    )


def _listed(runs: list[str]) -> str:
    return "".join(f"\n  {line}" for line in runs)


def refuse_no_run(tracking_uri: str | None) -> NoReturn:
    """Raises BadInput with the newest runs to choose from."""
    uri = resolved_uri(tracking_uri)
    where = f"{redacted(uri)} (--tracking-uri or MLFLOW_TRACKING_URI name another store)"
    if not (known := newest_runs(uri)):
        raise BadInput(f"no run is named, and there are none in {where}: gba-hvd report RUN, or a spool file or folder")
    newest = known[0].split()[0]
    raise BadInput(
        f"no run is named: gba-hvd report {newest} is for the newest. The newest in {where}, id, name and job:"
        f"{_listed(known)}"
    )
