"""`gba-hvd simulate training`: update rules and numbers of workers on a virtual clock, as a table and a picture.

What is simulated is in `simulated`; here are the options, the runs one after the other, and how they are shown.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import SHARED_MODES, any_of

from ...bench.harness.measure import ShowsDefaults
from ...simulated.output import json_values, loss_text, settings_of, silent_servers, write

if TYPE_CHECKING:
    from ...simulated.event_loop import TrainingOutcome
    from ...simulated.experiment import Experiment
    from .training_plot import TrainingLine


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "training",
        help="asynchronous training by 1 to 10,000 workers of drawn speeds",
        formatter_class=ShowsDefaults,
        description="Train a small task with the ledger, buffer, rules and optimizers of real servers, by workers "
        "whose service times are drawn from gamma laws, and show what loss, staleness and speed come of it.",
    )
    parser.add_argument("--task", default="quadratic", help="quadratic, logistic or clicks")
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16, 64], metavar="N")
    parser.add_argument("--mode", default="async", help=any_of(SHARED_MODES))
    parser.add_argument("--rule", nargs="+", default=["none", "dana_zero", "staleness_lr"], metavar="RULE")
    parser.add_argument(
        "--rule-settings", nargs="+", default=[], metavar="NAME=VALUE", help="of the rules that have settings: lambda=2"
    )
    parser.add_argument("--optimizer", default="momentum", help="sgd, momentum, adam, nadam, adagrad")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--micro-batches", type=int, default=2000, help="of a run")
    parser.add_argument("--micro-batch", type=int, default=64, help="samples")
    parser.add_argument("--step", type=int, default=8, metavar="M", help="micro-batches of a step (gba, bsp)")
    parser.add_argument("--spread", type=float, default=0.0, help="of the workers' mean speeds; 0: equal")
    parser.add_argument("--shape", type=float, default=100.0, help="of the gamma law of a worker's times")
    parser.add_argument("--latency", type=float, default=0.0, help="worker to server, in mean service times")
    parser.add_argument("--serve", type=float, default=0.0, help="the server's time for a push, in the same unit")
    parser.add_argument("--tolerance", type=int, default=4, help="gba: steps")
    parser.add_argument("--lookahead", type=int, help="gba, bsp: steps; 0 is lock-step (default: no limit)")
    parser.add_argument("--row-average", default="global", metavar="HOW", help="clicks: as of DistributedOptimizer")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with other samples, noise and speeds")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="also write the figures, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="loss over time, by workers and rule")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    if args.seeds < 1:
        raise BadInput(f"--seeds must be 1 or more, got {args.seeds}")
    args.rule_settings = parsed_settings(args.rule, args.rule_settings)
    torch.set_num_threads(1)
    plans = [
        [_experiment(args, n, rule, seed) for seed in range(args.seeds)] for n in args.workers for rule in args.rule
    ]
    with tempfile.TemporaryDirectory(prefix="gba-hvd-simulate-") as scratch:
        folder = _clicks(args, Path(scratch))
        with silent_servers():
            lines = [simulated(plan, folder) for plan in plans]
    show(lines, args)
    if args.plot:
        from .training_plot import draw

        draw(lines, f"{args.task}, {args.mode}, {args.optimizer} at {args.lr:g}", args.plot)
        print(f"drawn in {args.plot}")
    write(args.out, {"settings": settings_of(args), "results": json_values([_stored(line) for line in lines])})
    return 0


def _experiment(args: argparse.Namespace, workers: int, rule: str, seed: int) -> Experiment:
    from gba_hvd.update_rules import WITH_SETTINGS

    from ...simulated.experiment import Experiment

    return Experiment(
        task=args.task, workers=workers, mode=args.mode, rule=rule, optimizer=args.optimizer, lr=args.lr,
        micro_batches=args.micro_batches, micro_batch=args.micro_batch, n_micro=args.step, spread=args.spread,
        shape=args.shape, latency=args.latency, serve=args.serve, tolerance=args.tolerance, lookahead=args.lookahead,
        seed=seed, row_average=args.row_average,
        rule_settings={} if rule not in WITH_SETTINGS else args.rule_settings,
    )  # fmt: skip


def parsed_settings(rules: Sequence[str], given: Sequence[str]) -> dict[str, float | bool]:
    """`lambda=2 adaptive=false` as settings. Raises BadInput when they are none, or no rule has any."""
    from gba_hvd.update_rules import WITH_SETTINGS

    if given and not set(rules) & set(WITH_SETTINGS):
        raise BadInput(f"--rule-settings: only {', '.join(WITH_SETTINGS)} have settings, got --rule {' '.join(rules)}")
    found: dict[str, float | bool] = {}
    for one in given:
        name, _, text = one.partition("=")
        try:
            found[name] = text.lower() == "true" if text.lower() in ("true", "false") else float(text)
        except ValueError as error:
            raise BadInput(f"--rule-settings: expected NAME=VALUE with a number, true or false, got {one!r}") from error
    return found


def _clicks(args: argparse.Namespace, folder: Path) -> Path | None:
    if args.task != "clicks":
        return None
    from ...bench.harness import small_ctr

    small_ctr.write(folder / "data", args.micro_batches * args.micro_batch)
    return folder / "data"


def simulated(plan: Sequence[Experiment], clicks: Path | None) -> TrainingLine:
    """The runs of one number of workers and one rule."""
    from ...simulated.experiment import run as simulate
    from .training_plot import TrainingLine

    outcomes = [simulate(experiment, clicks) for experiment in plan]
    first, losses = outcomes[0], [outcome.loss for outcome in outcomes]
    names = {name for outcome in outcomes for name in outcome.scores}  # what diverged has no score
    scores = {name: median(o.scores[name] for o in outcomes if name in o.scores) for name in names}
    return TrainingLine(
        workers=plan[0].workers,
        rule=plan[0].rule,
        loss=median(losses),
        losses=losses,
        staleness_mean=mean_of(first.staleness),
        staleness_max=max(first.staleness, default=0),
        lag_mean=mean_of(first.dense_ages),
        gap=mean_gap(first)[0],
        gap_in_steps=mean_gap(first)[1],
        gap_by_worker={worker: (gap / n, in_steps / n) for worker, (n, gap, in_steps) in first.gaps.items()},
        dropped_share=first.dropped / max(1, first.dropped + first.applied),
        speed=speed(first),
        steps=first.steps,
        scores=scores,
        curve=list(first.curve),
        why=next((outcome.why for outcome in outcomes if outcome.why), ""),
    )


def mean_of(histogram: dict[int, int]) -> float:
    n = sum(histogram.values())
    return sum(key * count for key, count in histogram.items()) / n if n else 0.0


def mean_gap(outcome: TrainingOutcome) -> tuple[float, float]:
    """Mean gap of all pushes, and in steps; 0 where there was none."""
    n = max(1, sum(pushes for pushes, _, _ in outcome.gaps.values()))
    return sum(gap for _, gap, _ in outcome.gaps.values()) / n, sum(steps for *_, steps in outcome.gaps.values()) / n


def speed(outcome: TrainingOutcome) -> float:
    """Micro-batches per unit of time: what so many workers of the mean speed do alone, if nothing holds them up."""
    time, done, _ = outcome.curve[-1]
    return done / time if time else 0.0


def _stored(line: TrainingLine) -> dict[str, Any]:
    """A line under the names of the results file, where the scores have another one."""
    values = asdict(line)
    return {"judged" if name == "scores" else name: value for name, value in values.items()}


def show(lines: Sequence[TrainingLine], args: argparse.Namespace) -> None:
    from ...bench.harness.measure import print_figures

    columns = {
        "workers": "{workers:,}", "rule": "{rule}", "loss": "{shown}",
        **{name: f"{{scores[{name}]:.4f}}" for name in sorted({name for line in lines for name in line.scores})},
        "staleness": "{staleness_mean:.2f}", "largest": "{staleness_max}", "values old": "{lag_mean:.2f}",
        "gap": "{gap:.2g}", "in steps": "{gap_in_steps:.2f}", "dropped": "{dropped_share:.2%}",
        "speed": "{speed:.1f}", "steps": "{steps:,}",
    }  # fmt: skip
    title = f"{args.task}, {args.mode}, {args.optimizer}, learning rate {args.lr:g}"
    print_figures(title, columns, [vars(line) | {"shown": loss_text(line.loss)} for line in lines])
    print("staleness, values old: mean steps, of the token and of the dense values; speed: micro-batches per mean time")
    print("gap: how far the dense values have moved since they were used (root mean square), and in usual steps")
    for line in lines:
        if line.why:
            print(f"{line.workers:,} workers, {line.rule}: {json.dumps(line.why[:160])}")
