"""`gba-hvd report`: one HTML page about a run, with everything in it. What the page shows is in `tracking/report`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from pathlib import Path

from gba_hvd.errors import BadInput


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="one HTML page about a run: curves, modes, switches, staleness, every sample's whereabouts",
        description="Write one self-contained HTML page about a run, running or ended.",
    )
    parser.add_argument(
        "target",
        metavar="RUN",
        nargs="?",
        help="an MLflow run's id or name, a job's id, a spool file, or a folder of spools; left out: an error that "
        "names the newest runs",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report-NAME.html here")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object; no page")
    parser.add_argument("--tracking-uri", metavar="URI", help="default: MLflow's own, MLFLOW_TRACKING_URI")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from gba_hvd.tracking.find_run import read, refuse_no_run
    from gba_hvd.tracking.report.page import page
    from gba_hvd.tracking.run_history import as_json
    from gba_hvd.tracking.sender_process import prepare_process

    prepare_process()
    if args.target is None:
        refuse_no_run(args.tracking_uri)
    story = read(args.target, args.tracking_uri)
    if args.json:
        print(json.dumps(as_json(story), indent=2))
        return 0
    out = args.out or Path("report-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", story.title).strip("-") + ".html")
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(page(story), encoding="utf-8")
        fresh.rename(out)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise BadInput(f"{out} cannot be written: {error.strerror}; name another file with --out") from error
    print(f"{out} ({out.stat().st_size / 1e6:.1f} MB): open it in a browser")
    return 0
