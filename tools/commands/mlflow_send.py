"""`gba-hvd mlflow send`: deliver records that could not be sent to MLflow while their job was running."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from gba_hvd.errors import BadInput
from recovery.redaction import redacted

from ..signals import raise_if_ended
from ..terminal import print_line


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    mlflow = subparsers.add_parser("mlflow", help="send records that a job could not send to MLflow itself")
    commands = mlflow.add_subparsers(title="commands", metavar="COMMAND", required=True)
    parser = commands.add_parser("send", help="send what is in a spool file, or a folder of them")
    parser.add_argument(
        "spool", type=Path, nargs="+", metavar="SPOOL", help="a spool file (*.jsonl), or a folder of them"
    )
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="give up on a file after S seconds (default: 300)"
    )
    parser.set_defaults(run=send)


def send(args: argparse.Namespace) -> int:
    from gba_hvd.tracking.sender_process import locked, prepare_process, send_left_behind

    prepare_process()
    spools = sorted(_files(args.spool), key=lambda file: file.stat().st_mtime)
    if not spools:
        raise BadInput(f"no spool file (*.jsonl) in {', '.join(map(str, args.spool))}: nothing to send")
    failed = 0
    for spool in spools:
        with locked(spool) as mine:
            if not mine:
                print_line(f"{spool}: its job's own sender is at work, left alone")
                continue
            status = send_left_behind(spool, args.timeout, raise_if_ended)
        if status.done:
            dropped = f", {status.dropped} refused by MLflow" if status.dropped else ""
            dropped += f", {status.lost} lost before: its job could not write them" if status.lost else ""
            print_line(f"{spool}: sent to run {status.run_id} at {redacted(status.tracking_uri or '')}{dropped}")
        else:
            failed += 1
            print_line(f"{spool}: not sent, kept: {status.problem or 'no answer in time'}")
    return 1 if failed else 0


def _files(paths: Iterable[Path]) -> set[Path]:
    files: set[Path] = set()
    for path in paths:
        if path.is_dir():
            files |= set(path.glob("*.jsonl"))
        elif path.is_file():
            files.add(path)
        else:
            raise BadInput(f"{path} is neither a spool file nor a folder")
    return files
