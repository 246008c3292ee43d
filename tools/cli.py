"""The command `gba-hvd`: which subcommands there are, and how an error reaches the person.

Each subcommand is a module with `add_parser(subparsers)`; what it does, and its heavy imports, are in there.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from recovery.errors import ProjectError
from recovery.printable import printable

from . import bench, chaos
from .commands import advise, checkpoint, clean, data, doctor, job, mlflow_send, model, plan, report, run, simulate
from .signals import INTERRUPTED, ended_cleanly

COMMANDS = (run, doctor, data, job, clean, report, advise, bench, mlflow_send, plan, simulate, checkpoint, model, chaos)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gba-hvd", description="Tools around gba_hvd, the Horovod plugin for recommendation models."
    )
    parser.add_argument("--version", action="version", version=f"gba-hvd {version('gba-hvd')}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Errors a person can mend are one line, all others keep their traceback."""
    _open_missing_streams()
    args = build_parser().parse_args(run.apart(sys.argv[1:] if argv is None else argv))
    try:
        with ended_cleanly():
            status: int = args.run(args)
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("gba-hvd: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `gba-hvd data show --json | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        return 1
    except Exception as error:
        if not isinstance(error, ProjectError):
            raise
        print(f"gba-hvd: {printable(str(error))}", file=sys.stderr)
        return 1


def _open_missing_streams() -> None:
    """/dev/null for a standard stream that was closed when Python started (`>&-`), here and in what is started."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # the lowest free number, that of the missing stream
            stream = open(os.devnull, mode)  # noqa: SIM115
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)


if __name__ == "__main__":
    sys.exit(main())
