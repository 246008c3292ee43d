"""`gba-hvd advise`: how far a learning rate is from the limit that old dense values set, and how many workers help.

Where the figures come from is decided here; what follows from them in `gba_hvd.update_rules`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from gba_hvd.errors import BadInput

from ..bench.harness.measure import ShowsDefaults
from ..terminal import print_line

if TYPE_CHECKING:
    from gba_hvd.tracking.run_history import RunHistory
    from gba_hvd.update_rules.delay_sequence import Arrivals

_HOW_TO_MEASURE = (
    "measure it in the script, gba_hvd.update_rules.stability.largest_curvature(loss_fn, model.parameters()), and "
    "either report it with state.report(curvature=...) or give it here with --curvature"
)

_NO_MOMENTUM = "momentum is not known and taken as 0: give --momentum"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "advise",
        help="how old dense values may be at a learning rate, and how many workers help",
        formatter_class=ShowsDefaults,
        description="Say how far a learning rate is from the stability limit, from a run's measurements or from "
        "figures, which win: where the error of SGD begins to grow, with the ages of the dense values in the order in "
        "which a run that has ended had them, else by the roots of the equation with their mean. Exit status 1 when it "
        "is unstable. With --workers: what numbers of workers, tolerances and server times would give, and at how many "
        "workers more of them stop helping.",
    )
    parser.add_argument("target", metavar="RUN", nargs="?", help="as for `gba-hvd report`: the run that measured it")
    parser.add_argument("--lr", type=float, help="learning rate (default: the largest of the run's dense part)")
    parser.add_argument("--curvature", type=float, help="largest curvature of the loss (default: the run's metric)")
    parser.add_argument(
        "--momentum", type=float, help="of SGD, or the first beta of Adam (default: the run's; 0 where it is not known)"
    )
    parser.add_argument(
        "--dampening", type=float, help="of the momentum; for Adam its first beta again (default: the run's, or 0)"
    )
    parser.add_argument(
        "--ahead", type=float, metavar="STEPS", help="of rule look_ahead, its steps (default: the run's, or 0)"
    )
    parser.add_argument("--age", type=float, metavar="MEAN", help="of the dense values, in steps (default: the run's)")
    parser.add_argument("--age-max", type=int, metavar="MAX", help="with --age (default: the mean is all there is)")
    parser.add_argument("--workers", type=int, nargs="+", metavar="N", help="work out these numbers of workers instead")
    parser.add_argument(
        "--micro-batch-s",
        type=float,
        nargs="+",
        metavar="S",
        help="seconds of the workers, repeated in turn; with --workers",
    )
    parser.add_argument("--serve-s", type=float, nargs="+", default=[0.0], help="a server's seconds for a push")
    parser.add_argument("--step", type=int, default=1, metavar="M", help="pushes of a step; 1: mode async")
    parser.add_argument("--tolerance", type=int, nargs="+", default=[4], help="steps; with --step above 1")
    parser.add_argument("--tracking-uri", metavar="URI", help="default: MLflow's own, MLFLOW_TRACKING_URI")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a sentence")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Figures:
    """What the advice is about; None where it is not known.

    ages: histogram of the dense values' ages, in steps. arrivals: the same of the newest steps, in their order
    momentum, dampening: of SGD, or the first beta of Adam and its kind, see `update_rules.momentum`
    optimizer: "SGD" also where it is not known. rule: of the servers; "none" where it is not known
    lr: the largest of the run; last_lr: its newest, where a schedule moves it. betas: of Adam and its kind, as text
    ahead: of rule look_ahead, how far, in steps
    """

    lr: float | None = None
    curvature: float | None = None
    ages: Mapping[int, float] | None = None
    arrivals: Arrivals | None = None
    momentum: float | None = None
    optimizer: str = "SGD"
    rule: str = "none"
    last_lr: float | None = None
    betas: str = ""
    ahead: float = 0.0
    dampening: float = 0.0


def run(args: argparse.Namespace) -> int:
    from gba_hvd.update_rules.stability import advise

    _refuse_idle(args)
    measured = Figures()
    if args.target is not None:
        from gba_hvd.tracking.find_run import read
        from gba_hvd.tracking.sender_process import prepare_process

        prepare_process()
        measured = figures_of(read(args.target, args.tracking_uri), needs_lr=args.lr is None)
    lr = _first(args.lr, measured.lr)
    curvature = _first(args.curvature, measured.curvature)
    if lr is None:
        raise BadInput("the learning rate is not known: give --lr" + ("" if args.target else ", or a run"))
    if curvature is None:
        raise BadInput(f"the curvature is not known: {_HOW_TO_MEASURE}")
    momentum = _first(args.momentum, measured.momentum)
    of_the_run = measured.dampening if args.momentum is None else 0.0
    dampening = of_the_run if args.dampening is None else args.dampening
    ahead = measured.ahead if args.ahead is None else args.ahead
    lacks = _lacks(args, measured, lr, momentum)
    if args.workers:
        return sweep(args, lr, curvature, momentum or 0.0, dampening, ahead, lacks)
    ages = measured.ages if args.age is None else ages_of(args.age, args.age_max)
    if ages is None:
        raise BadInput("the age of dense values is not known: give --age, or a run that was in an asynchronous mode")
    arrivals = measured.arrivals if args.age is None else None
    advice = advise(lr, curvature, ages, momentum or 0.0, arrivals=arrivals, ahead=ahead, dampening=dampening)
    advice = replace(advice, reason="; ".join([advice.reason, *lacks]))
    if args.json:
        print(json.dumps(asdict(advice), indent=2))
    else:
        print_line(advice.reason)
    return 0 if advice.is_stable else 1


def _lacks(args: argparse.Namespace, measured: Figures, lr: float, momentum: float | None) -> list[str]:
    """What the equation has not, or takes otherwise than the run had it."""
    lacks = [_NO_MOMENTUM] if momentum is None else []
    if args.lr is None and measured.last_lr is not None and measured.last_lr != lr:
        lacks.append(f"that learning rate is the largest of the run's schedule, the newest is {measured.last_lr:g}")
    if measured.betas:
        lacks.append(
            f"of {measured.optimizer} with betas {measured.betas} the equation has the first moment, so the curvature "
            "must be that of the preconditioned loss"
        )
    elif measured.optimizer != "SGD":
        lacks.append(f"the equation is that of SGD, the run's optimizer is {measured.optimizer}")
    if measured.rule not in ("none", "look_ahead"):
        lacks.append(f"the run's rule {measured.rule} is not in the equation")
    return lacks


def _refuse_idle(args: argparse.Namespace) -> None:
    """Raise BadInput for options that the others make void."""
    of_the_sweep = args.micro_batch_s is not None or args.serve_s != [0.0] or args.step != 1 or args.tolerance != [4]
    if of_the_sweep and not args.workers:
        raise BadInput(
            "--micro-batch-s, --serve-s, --step and --tolerance are for --workers N...: give it, or not these"
        )
    if args.workers and (args.age is not None or args.age_max is not None):
        raise BadInput("--workers works the ages out: leave --age and --age-max out")
    if args.workers and args.micro_batch_s is None:
        raise BadInput("--workers needs --micro-batch-s: what a worker takes for a micro-batch, in seconds")
    if args.dampening is not None and args.momentum is None and args.target is None:
        raise BadInput("--dampening is of a momentum: give --momentum, or leave it out")
    if args.age_max is not None and args.age is None:
        raise BadInput("--age-max is given with --age, the mean")
    if args.step == 1 and args.tolerance != [4]:
        raise BadInput("--tolerance has no effect with --step 1: in mode async nothing is dropped")


def ages_of(mean: float, oldest: int | None) -> dict[int, float]:
    """A distribution of that mean: around it, or, where the largest is known, of values 0 and the largest as well.

    Raises BadInput when there is none.
    """
    from gba_hvd.update_rules.delay_roots import at_mean

    found = at_mean(mean)
    if oldest is None or oldest <= max(found):
        if oldest is not None and mean > oldest:
            raise BadInput(f"the mean age {mean} is above the largest, {oldest}")
        return found
    share = min(0.05, mean / oldest / 2)  # so many are of the largest age
    rest = at_mean((mean - share * oldest) / (1 - share))
    ages = {age: n * (1 - share) for age, n in rest.items()}
    ages[oldest] = ages.get(oldest, 0.0) + share
    return ages


def sweep(
    args: argparse.Namespace, lr: float, curvature: float, momentum: float, dampening: float, ahead: float,
    lacks: Sequence[str],
) -> int:  # fmt: skip
    """A row for each number of workers, tolerance and server time; then what the equation lacks."""
    from gba_hvd.update_rules.delay_model import scaled, stops_helping

    from ..bench.harness.measure import print_figures

    columns = {
        "workers": "{workers}", "steps/s": "{steps_per_s:.4g}", "mean age": "{age_mean:.2f}",
        "dropped": "{dropped_share:.1%}", "lr limit": "{lr_limit:.3g}", "progress/s": "{pace}", "server full": "{full}",
    }  # fmt: skip
    found, more = [], {"ahead": ahead, "dampening": dampening}
    for serve_s in args.serve_s:
        for tolerance in args.tolerance:
            scales = [
                scaled(n, args.micro_batch_s, args.step, tolerance, serve_s, lr, curvature, momentum, **more)
                for n in sorted(args.workers)
            ]
            facts = {"tolerance": tolerance, "serve_s": serve_s, "ahead": ahead, "lacks": list(lacks)}
            most = stops_helping(scales)
            found.append({**facts, "most_workers": most, "scales": [asdict(scale) for scale in scales]})
            if args.json:
                continue
            rows = []
            for scale in scales:
                pace = f"{scale.progress:.3g}" if scale.progress > 0 else "unstable"
                rows.append({**asdict(scale), "pace": pace, "full": "yes" if scale.is_full else ""})
            title = f"server {serve_s:g} s a push" + (f", tolerance {tolerance}" if args.step > 1 else "")
            print_figures(title, columns, rows)
            if not most:
                print("no number of workers is stable")
            elif most == max(args.workers):
                print(f"{most} workers, the most of these, are the fastest: give larger numbers to see where it ends")
            else:
                print(f"more than {most} workers do not help")
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        for line in ([f"values are {ahead:g} of a step ahead"] if ahead else []) + [*lacks]:
            print_line(line)
    return 0 if any(one["most_workers"] for one in found) else 1


def figures_of(story: RunHistory, needs_lr: bool) -> Figures:
    """What a run measured. Raises BadInput when it has several learning rates and one is needed."""
    from gba_hvd.tracking.gauges import DENSE_AGE_MAX, DENSE_AGE_MEAN
    from gba_hvd.update_rules.look_ahead import steps_of

    ages: Mapping[int, float] | None = dict(story.dense_ages) or None
    if ages is None and (points := story.history.get(DENSE_AGE_MEAN)):  # it has not ended, or not well
        mean = sum(point.value for point in points) / len(points)
        ages = ages_of(mean, int(max(mean, *(point.value for point in story.history.get(DENSE_AGE_MAX, points)))))
    try:
        momentum = float(story.params["dense_momentum"])  # of SGD, or a class of the user's that is one
    except (KeyError, ValueError):
        momentum = None
    lr, last_lr = _lr_of(story) if needs_lr else (None, None)
    rule = story.params.get("rule", "none")
    ahead = steps_of(rule, {n: v for n, v in (("steps", story.params.get("rule_settings.steps")),) if v is not None})
    if momentum is not None:
        betas, optimizer, dampening = "", "SGD", float(story.params.get("dense_dampening", 0.0))
    else:
        betas, optimizer = story.params.get("dense_betas", ""), story.params.get("optimizer", "SGD")
        momentum = _first_beta(betas)
        dampening = momentum or 0.0
    return Figures(
        lr, story.last("curvature"), ages, story.arrivals or None, momentum, optimizer, rule, last_lr, betas, ahead,
        dampening,
    )  # fmt: skip


def _first_beta(betas: str) -> float | None:
    """The largest of the groups'. betas: "[0.9, 0.999]", or a list of such lists; empty: there are none."""
    if not betas:
        return None
    found = json.loads(betas)
    return max(float(one[0]) for one in (found if isinstance(found[0], list) else [found]))


def _lr_of(story: RunHistory) -> tuple[float | None, float | None]:
    """(largest, newest) learning rate of the dense part; the newest is None where no schedule moved it.

    What the library recorded wins over what the script called a learning rate.
    """
    from gba_hvd.tracking.plots import DENSE_LR, SCRIPT_LRS

    if DENSE_LR in story.params:
        start = float(story.params[DENSE_LR])
        logged = [story.history[name] for name in (DENSE_LR, *SCRIPT_LRS) if story.history.get(name)]
        moved = [point.value for point in logged[0]] if logged else []
        return max([start, *moved]), moved[-1] if moved else None
    rates = {}
    for name, text in story.params.items():
        if name.rpartition(".")[2] in SCRIPT_LRS:
            try:
                rates[name] = float(text)
            except ValueError:
                continue
    if len(set(rates.values())) > 1:
        listed = ", ".join(f"{name}={rate:g}" for name, rate in sorted(rates.items()))
        raise BadInput(f"{story.title} has several learning rates ({listed}): give the one of the dense part with --lr")
    return next(iter(rates.values()), None), None


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
