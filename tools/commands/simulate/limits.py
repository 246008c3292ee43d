"""`gba-hvd simulate limits`: the stability limit that `gba-hvd advise` predicts, beside the one that is observed."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gba_hvd.errors import BadInput

from ...bench.harness.measure import ShowsDefaults
from ...simulated.output import write


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "limits",
        help="the largest stable learning rate by delay: predicted and observed",
        formatter_class=ShowsDefaults,
        description="Train a quadratic with gradients that are all equally old, and find the learning rate from which "
        "on it diverges. Predicted is what `gba-hvd advise` goes by.",
    )
    parser.add_argument("--delays", type=int, nargs="+", metavar="STEPS", help="default: 0, 1, 2, 4, ... 64")
    parser.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="instead: fleets of workers, with the ages that come of them",
    )
    parser.add_argument("--step", type=int, default=1, metavar="M", help="of fleets: 1 is mode async, more is gba")
    parser.add_argument(
        "--optimizer", choices=("sgd", "adam"), default="sgd",
        help="of fleets: adam has the momentum as its first beta, and a constant preconditioner",
    )  # fmt: skip
    parser.add_argument("--momentum", type=float, default=0.0, help="of fleets: of the optimizer")
    parser.add_argument(
        "--ahead", type=float, default=0.0, metavar="STEPS",
        help="of fleets: rule look_ahead with so many steps; needs momentum",
    )  # fmt: skip
    parser.add_argument("--spread", type=float, default=0.0, help="of fleets: of the workers' mean speeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], metavar="N", help="of fleets: of speeds and times")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    from ...bench.harness.measure import print_figures
    from ...simulated.stability_limit import DELAYS, observe

    torch.set_num_threads(1)
    if args.workers and args.delays is not None:
        raise BadInput("--delays are fixed delays, --workers are fleets: give one of them")
    if args.workers:
        return _fleets(args)
    of_fleets = {"step": 1, "optimizer": "sgd", "momentum": 0.0, "ahead": 0.0, "spread": 0.0, "seeds": [0]}
    if given := [f"--{name}" for name, default in of_fleets.items() if getattr(args, name) != default]:
        raise BadInput(f"{', '.join(given)}: of fleets; give --workers, or leave it out")
    found = [observe(delay) for delay in (DELAYS if args.delays is None else args.delays)]
    rows = [asdict(f) | {"error": f.error} for f in found]
    columns = {
        "delay": "{delay}", "predicted": "{predicted:.5f}", "observed: fades": "{stable:.5f}",
        "grows": "{unstable:.5f}", "predicted / observed - 1": "{error:+.2%}",
    }  # fmt: skip
    print_figures("Largest stable learning rate x curvature", columns, rows)
    write(args.out, rows)
    return 0


def _fleets(args: argparse.Namespace) -> int:
    from ...bench.harness.measure import print_figures
    from ...simulated.stability_limit import observe_fleet

    found = [
        observe_fleet(n, args.step, args.momentum, args.spread, seed=seed, ahead=args.ahead, optimizer=args.optimizer)
        for n in args.workers
        for seed in args.seeds
    ]
    rows = [asdict(f) | {"error": f.error} for f in found]
    others = {"by speeds alone": "speeds", "by the mean": "roots", "plain formula": "plain", "ages drawn": "drawn"}
    columns = {
        "workers": "{workers}", "seed": "{seed}", "mean age": "{age_mean:.2f}", "oldest": "{age_max}",
        "predicted": "{predicted:.5f}", "observed": "{observed:.5f}", "error": "{error:+.1%}",
        **{title: f"{{by[{name}]:+.1%}}" for title, name in others.items()},
    }  # fmt: skip

    def error(row: dict[str, Any], name: str) -> float | None:
        return None if row[name] is None else row[name] / row["observed"] - 1

    setting = (
        f"{args.step} pushes a step, {args.optimizer}, momentum {args.momentum:g}, spread of speeds {args.spread:g}"
    )
    setting += f", values {args.ahead:g} of a step ahead" if args.ahead else ""
    shown = [{**row, "by": {name: error(row, name) for name in others.values()}} for row in rows]
    print_figures(f"Largest stable learning rate x curvature: {setting}", columns, shown)
    print(f"largest error: {max(abs(f.error) for f in found):.1%}; the other columns are errors, too")
    write(args.out, rows)
    return 0
