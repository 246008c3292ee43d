"""What a checkpoint location, or a running job, reports of its costs: from the newest complete checkpoint there.

Finds figures; `commands.plan` uses them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from recovery.errors import BadInput
from recovery.schedule.adaptive import JobMeasurements


@dataclass(frozen=True)
class MeasuredCosts:
    """costs, given, pace: plain values, as the checkpoint's `about` has them; empty: it says nothing of them."""

    checkpoint: str
    n_bytes: int
    n_servers: int
    costs: dict[str, Any]
    given: dict[str, Any]
    measured: JobMeasurements
    pace: dict[str, Any]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="costs, tables, failures: what the newest checkpoint there says was measured")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for the store of --url")
    parser.add_argument("--job", metavar="ID", help="as --url, of the location where this running job saves")
    parser.add_argument(
        "--dir", type=Path, help="of --job: where shards lie (default: GBA_HVD_SHARD_DIR, else /dev/shm)"
    )
    parser.add_argument("--timeout", type=float, default=10.0, metavar="S", help="wait so long for the job's answer")


def of_arguments(args: argparse.Namespace) -> MeasuredCosts | None:
    """None when neither a location nor a job was named. Raises BadInput when there is nothing to be read."""
    if args.url and args.job:
        raise BadInput("--url and --job say the same: give one of them")
    url = location_of_job(args) if args.job else args.url
    return of_newest(url, args.option) if url else None


def location_of_job(args: argparse.Namespace) -> str:
    from ..running_jobs import ask_status, bases_of, find_job

    report = ask_status(find_job(bases_of(args), args.job), args.timeout)
    if not report.get("checkpoints"):
        raise BadInput(
            f"job {args.job!r} saves nowhere, as far as this host's server knows: it has no CheckpointCallback, or has "
            "not begun to save; name the location with --url"
        )
    return str(report["checkpoints"])


def of_newest(url: str, options: list[str]) -> MeasuredCosts:
    from recovery.catalog.chains import Chain, chains

    from ..checkpoint.store_argument import store_of

    store = store_of(url, options)
    chain = next((one for one in chains(store) if isinstance(one, Chain)), None)
    if chain is None:
        raise BadInput(f"{store.url} has no checkpoint that is whole: nothing was measured there")
    about, measured = chain.newest.about, JobMeasurements.of_checkpoint(chain.newest)
    servers, costs = about.get("n_servers"), measured.costs()
    return MeasuredCosts(
        checkpoint=chain.newest.name,
        n_bytes=chain.newest.schema.n_bytes,
        n_servers=servers if isinstance(servers, int) and servers > 0 else 1,
        costs=_object(about.get("costs")) if costs is None else asdict(costs),
        given=_object(about.get("given")),
        measured=measured,
        pace=_object(about.get("pace")),
    )


def _object(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def read_costs(path: Path) -> dict[str, Any]:
    """Measured costs, from a JSON object that has them under "costs", as a checkpoint's `about`, or that is them."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read as JSON: {error}") from error
    costs = found.get("costs", found) if isinstance(found, dict) else None
    if not isinstance(costs, dict):
        raise BadInput(f"{path}: expected a JSON object with save_s, load_s, reschedule_s")
    return costs
