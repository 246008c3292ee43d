"""`gba-hvd simulate`: what of a job's life runs on a virtual clock. Each is a file of its own."""

from __future__ import annotations

import argparse

from . import agreement, auto, limits, recovery, training

SIMULATIONS = (training, recovery, limits, auto, agreement)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("simulate", help="training, or a year of operation, on a virtual clock")
    simulations = parser.add_subparsers(dest="simulation", required=True, metavar="WHAT")
    for module in SIMULATIONS:
        module.add_parser(simulations)
