"""`gba-hvd advise`: how far a learning rate is from the limit that staleness sets, for a run or for figures given.

Where the figures come from is decided here; what follows from them in `gba_hvd.update_rules.stability`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory

_HOW_TO_MEASURE = (
    "measure it in the script, gba_hvd.update_rules.stability.largest_curvature(loss_fn, model.parameters()), and "
    "either report it with state.report(curvature=...) or give it here with --curvature"
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "advise",
        help="how much staleness a learning rate bears",
        description="Say how far a learning rate is from the stability limit, from a run's measurements or from "
        "figures, which win. Theory is that of plain SGD. Exit status 1 when it is unstable.",
    )
    parser.add_argument("target", metavar="RUN", nargs="?", help="as for `gba-hvd report`: the run that measured it")
    parser.add_argument("--lr", type=float, help="learning rate (default: the run's parameter lr)")
    parser.add_argument("--curvature", type=float, help="largest curvature of the loss (default: the run's metric)")
    parser.add_argument("--staleness", type=float, metavar="MEAN", help="mean staleness in steps (default: the run's)")
    parser.add_argument("--staleness-max", type=float, metavar="MAX", help="default: the run's, else the mean")
    parser.add_argument("--tracking-uri", metavar="URI", help="default: MLflow's own (MLFLOW_TRACKING_URI)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Figures:
    """What the advice is about; None where it is not known."""

    lr: float | None = None
    curvature: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None


def run(args: argparse.Namespace) -> int:
    from gba_hvd.errors import BadInput
    from gba_hvd.update_rules.stability import advise

    measured = Figures()
    if args.target is not None:
        from gba_hvd.tracking.find_run import read
        from gba_hvd.tracking.sender_process import prepare_process

        prepare_process()
        measured = figures_of(read(args.target, args.tracking_uri), needs_lr=args.lr is None)
    lr = _first(args.lr, measured.lr)
    curvature = _first(args.curvature, measured.curvature)
    mean = _first(args.staleness, measured.staleness_mean)
    # A mean that was given replaces the run's measurement, and its maximum with it.
    worst = _first(args.staleness_max, measured.staleness_max if args.staleness is None else None, mean)
    if lr is None:
        raise BadInput("the learning rate is not known: give --lr" + ("" if args.target else ", or a run"))
    if curvature is None:
        raise BadInput(f"the curvature is not known: {_HOW_TO_MEASURE}")
    if mean is None or worst is None:
        raise BadInput("the staleness is not known: give --staleness, or a run that was in an asynchronous mode")
    advice = advise(lr, curvature, mean, worst)
    print(json.dumps(asdict(advice), indent=2) if args.json else advice.reason)
    return 0 if advice.is_stable else 1


def figures_of(story: RunHistory, needs_lr: bool) -> Figures:
    """What a run measured. Raises BadInput when it has several learning rates and one is needed."""
    from gba_hvd.tracking.gauges import STALENESS_MAX, STALENESS_MEAN, mean_staleness

    mean, worst = None, None
    if histogram := story.staleness:
        mean, worst = mean_staleness(histogram), float(max(histogram))
    elif points := story.history.get(STALENESS_MEAN):  # it has not ended, or not well
        mean = sum(point.value for point in points) / len(points)
        worst = max([mean, *(point.value for point in story.history.get(STALENESS_MAX, ()))])
    return Figures(_lr_of(story) if needs_lr else None, story.last("curvature"), mean, worst)


def _lr_of(story: RunHistory) -> float | None:
    from gba_hvd.errors import BadInput

    rates = {}
    for name, text in story.params.items():
        if name.rpartition(".")[2] in ("lr", "learning_rate"):
            try:
                rates[name] = float(text)
            except ValueError:
                continue
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in sorted(rates.items()))
        raise BadInput(f"{story.title} has several learning rates ({listed}): give the one of the dense part with --lr")
    return next(iter(rates.values()), None)


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
