"""`gba-hvd bench delay`: update rules under delay, on a virtual clock: which hold where plain momentum fails.

Every push is a step (mode `async`), workers are equal. For each rule that goes with the optimizer (SGD with momentum,
unless set otherwise), number of workers and learning rate: the final loss, median over seeds. Three questions are put
to it:

    loss            at the learning rate that is best for one worker without a rule, used with any number of workers
    best            at each rule's own best learning rate of the grid, for that number of workers
    largest_lr      of the grid, at which no seed diverged or ended worse than it began

Learning rates are the optimizer's without a rule. With SGD, delayed Nesterov, which discounts gradients, gets
1 / (1 - momentum) times as much, so that all move as fast; with NAdam it adds nothing, and is `none`. A rule holds with
so many workers if its best is within 5 % of what the one worker reached, measured from where training began.

Rows in the result file are kept and not simulated again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import takewhile
from statistics import median
from typing import Any

from gba_hvd.errors import BadInput

from ..simulated.output import json_values, loss_text, silent_servers
from .harness import measure, resumable
from .harness.measure import Row, Subparsers

WORKERS = (4, 8, 16, 32, 64)
RATES: dict[str, dict[str, tuple[float, ...]]] = {  # by optimizer, as `simulate training` calls them, and task
    "momentum": {"quadratic": (0.1, 0.03, 0.01, 0.003, 0.001), "logistic": (1.0, 0.3, 0.1, 0.03, 0.01)},
    "sgd": {"quadratic": (1.0, 0.3, 0.1, 0.03, 0.01), "logistic": (10.0, 3.0, 1.0, 0.3, 0.1)},
    "adam": {"quadratic": (0.1, 0.03, 0.01, 0.003, 0.001), "logistic": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)},
    "nadam": {"quadratic": (0.1, 0.03, 0.01, 0.003, 0.001), "logistic": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)},
}
TASKS = ("quadratic", "logistic")
MICRO_BATCHES = 1000
HOLDS_WITHIN = 0.05
KEY = ("task", "rule", "workers")
Losses = dict[tuple[str, int, float], list[float]]  # by rule, workers, learning rate: one for each seed


def add_parser(subparsers: Subparsers) -> None:
    does = "update rules under delay, simulated"
    parser = measure.add_benchmark(subparsers, "delay", does, __doc__, run, help="rows in it are kept")
    parser.add_argument("--workers", type=int, nargs="+", default=list(WORKERS), metavar="N")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=TASKS)
    parser.add_argument("--optimizer", default="momentum", choices=tuple(RATES), help="momentum: SGD with momentum")
    parser.add_argument("--rules", nargs="+", metavar="RULE", help="default: all that go with the optimizer")
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help="of a run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")


@dataclass(frozen=True)
class Run:
    """All learning rates and seeds of a rule with so many workers."""

    task: str
    rule: str
    workers: int

    def __str__(self) -> str:
        return f"{self.task}, {self.workers} workers, {self.rule}"


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    import torch

    from ..simulated.experiment import Experiment

    if args.seeds < 1:
        raise BadInput(f"--seeds must be 1 or more, got {args.seeds}")
    torch.set_num_threads(1)
    of = Experiment(optimizer=args.optimizer).optimizer_spec()["groups"][0]
    settings = {
        "mode": "async", "optimizer": args.optimizer, "optimizer_settings": {k: v for k, v in of.items() if k != "lr"},
        "micro_batches": args.micro_batches, "seeds": args.seeds, "holds_within": HOLDS_WITHIN,
        "rates": RATES[args.optimizer],
    }  # fmt: skip
    rules = rules_for(args.optimizer, args.rules)
    of_task = [("none", 1), *((rule, n) for n in args.workers for rule in rules)]
    planned = list(dict.fromkeys(Run(task, rule, n) for task in args.tasks for rule, n in of_task))

    def answers(rows: list[Row]) -> dict[str, Any]:
        left = {one.task for one in resumable.missing(planned, rows, KEY)}
        return summaries([row for row in rows if row["task"] not in left], RATES[args.optimizer])

    results = resumable.Results(args.out, KEY, settings, lambda rows: {"tasks": answers(rows)})

    def simulate(one: Run) -> None:
        with silent_servers():
            results.rows.extend(json_values(simulated(one, args.optimizer, args.micro_batches, args.seeds)))

    results.run_each(results.waiting(planned), simulate)
    for task, found in answers(results.rows).items():
        show(f"{task}, {args.optimizer}", found)
    return results.end()


def summaries(rows: Sequence[Row], rates: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The answers by task, of all rules and workers that have rows."""
    found: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        losses: Losses = {
            (row["rule"], row["workers"], row["lr"]): [math.inf if loss is None else loss for loss in row["losses"]]
            for row in of_task
        }
        found[task] = json_values(summary(losses, rates[task], of_task[0]["loss_at_start"]))
    return found


def rules_for(optimizer: str, asked: Sequence[str] | None = None) -> list[str]:
    """The rules that go with it; or those that were asked for. Raises BadInput for one that does not."""
    from gba_hvd.update_rules import RULES, check

    from ..simulated.experiment import Experiment

    spec, fit = Experiment(optimizer=optimizer).optimizer_spec(), []
    for rule in asked or ():
        check(rule, spec)
    if asked:
        return list(asked)
    for rule in RULES:
        with suppress(BadInput):
            check(rule, spec)
            fit.append(rule)
    return fit


def simulated(one: Run, optimizer: str, micro_batches: int, seeds: int) -> list[Row]:
    """A row with the final losses for each learning rate."""
    from ..simulated.experiment import MOMENTUM, Experiment, loss_at_start, run_grid

    is_discounted = one.rule == "delayed_nesterov" and optimizer == "momentum"
    rates = RATES[optimizer][one.task]
    own = [lr / (1 - MOMENTUM) if is_discounted else lr for lr in rates]
    settings = [
        Experiment(one.task, one.workers, rule=one.rule, optimizer=optimizer, micro_batches=micro_batches, seed=seed)
        for seed in range(seeds)
    ]
    by_seed = [run_grid(experiment, own) for experiment in settings]
    start = loss_at_start(settings[0])
    losses = [[found[number] for found in by_seed] for number in range(len(rates))]
    print(f"{one}: best {min(map(median, losses)):.4g}", flush=True)
    return [
        {**asdict(one), "lr": lr, "losses": some, "loss": median(some), "loss_at_start": start}
        for lr, some in zip(rates, losses, strict=True)
    ]


def summary(
    losses: Mapping[tuple[str, int, float], Sequence[float]], rates: Sequence[float], start: float
) -> dict[str, Any]:
    """The answers by rule and number of workers, of those that were simulated. start: the loss before training."""

    def middle(rule: str, n: int, lr: float) -> float:
        return median(losses[rule, n, lr])

    tuned = min(rates, key=lambda lr: middle("none", 1, lr))
    alone = middle("none", 1, tuned)
    bound = alone + HOLDS_WITHIN * (start - alone)
    simulated = list(dict.fromkeys((rule, n) for rule, n, _ in losses))
    if any(pair != ("none", 1) for pair in simulated) and not any(n == 1 for rule, n in simulated if rule != "none"):
        simulated.remove(("none", 1))  # it is there for the learning rate alone
    workers = {rule: sorted(n for of, n in simulated if of == rule) for rule, _ in simulated}

    def by_rule(value: Callable[[str, int], Any]) -> dict[str, dict[str, Any]]:
        return {rule: {str(n): value(rule, n) for n in some} for rule, some in workers.items()}

    def best(rule: str, n: int) -> float:
        return min(middle(rule, n, lr) for lr in rates)

    def largest(rule: str, n: int) -> float | None:
        return max((lr for lr in rates if max(losses[rule, n, lr]) <= start), default=None)

    def held(loss: Callable[[int], float], some: Sequence[int]) -> int:
        """The most workers up to which a loss stays within the bound; 0 if not even with the fewest."""
        good = list(takewhile(lambda n: loss(n) <= bound, some))
        return good[-1] if good else 0

    return {
        "one_worker": {"lr": tuned, "loss": alone, "loss_at_start": start},
        "loss": by_rule(lambda rule, n: middle(rule, n, tuned)),
        "best": by_rule(best),
        "best_lr": by_rule(lambda rule, n: min(rates, key=lambda lr: middle(rule, n, lr))),
        "largest_lr": by_rule(largest),
        "holds_to_at_tuned_lr": {r: held(partial(middle, r, lr=tuned), some) for r, some in workers.items()},
        "holds_to_at_best_lr": {r: held(partial(best, r), some) for r, some in workers.items()},
    }


def show(task: str, found: Mapping[str, Any]) -> None:
    one, workers = found["one_worker"], sorted({int(n) for of_rule in found["loss"].values() for n in of_rule})
    titles = {
        "loss": f"{task}: final loss at learning rate {one['lr']:g}, where one worker reaches {one['loss']:.4g}",
        "best": f"{task}: final loss at each one's best learning rate",
        "largest_lr": f"{task}: largest learning rate that holds",
    }
    for name, title in titles.items():
        rows = []
        for rule, by_workers in found[name].items():
            unknown = "none" if name == "largest_lr" else loss_text(math.inf)
            words = [unknown if (v := by_workers.get(str(n), "")) is None else v for n in workers]
            rows.append((rule, *(v if isinstance(v, str) else loss_text(v) for v in words)))
        measure.print_table(title, ("rule", *(f"{n} workers" for n in workers)), rows)
    for name in ("holds_to_at_tuned_lr", "holds_to_at_best_lr"):
        print(f"{task}, {name} (workers): " + ", ".join(f"{rule} {n}" for rule, n in found[name].items()))
