"""When a job should change between allreduce and gba: a decision from measured rates, with a sentence that says why.

`decide` is a function of where the job stands, what was measured and the options. It neither measures nor switches:
the engine passes `Rates`, stores the `Stance` between calls, and carries a switch out at a step boundary. The mode that
the job is in has a measured rate, the other one a predicted rate, times what the last switch has shown the prediction
to be worth: before and after it both modes are measured. A switch needs a gain that lasts, and that has cost a second
of work by then, so that noise moves nothing. Where the other mode was not measured for an hour, and may be faster than
predicted, a short trial of it finds out, if its cost is within a budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from gba_hvd.errors import BadInput
from gba_hvd.mode_names import known_mode
from gba_hvd.switching.measurements import FORGET_S, N_RECENT
from gba_hvd.switching.predictions import Rates, predicted

LOST_S = 1.0  # of work, lost before a switch for it: about what a switch and the way back take together
UNCERTAIN = 0.2  # by so much a rate may differ from a prediction that nothing has confirmed: of CPUs, links, servers
SWITCH_S = 0.5  # assumed of one switch: below two steps of usual jobs
BROKEN = 0.25  # a mode so much slower than the other is left before `min_stay`: 20 slow steps may be a long time
_LEAST = 1e-9  # micro-batches/s of a mode in which all would be dropped
COMPARED = 16  # steps before a switch that must be alike to learn from it: of fewer, chance is several percent
_ALIKE = 0.2  # so far the newest steps may be from all of these: a worker that has just become slow is further
_NOTABLE = 1.05  # so many times as slow as others is worth a word
_OFTEN = 0.15  # of the time: to be stopped for less is to be slow
_EXPLAINED = 1.2  # a prediction of so many times what the slowest worker's mean says needs one more
_CHANGED = 2.0  # so many times as slow or fast as right after a switch: what comes then is not its doing


@dataclass(frozen=True)
class Options:
    """When a switch pays.

    enter_gain: to gba when it is at least this many times as fast as allreduce
    leave_gain: back to allreduce when gba is less than this many times as fast
    patience:   global steps for which this must hold
    min_stay:   global steps in a mode before it is left, the first mode of the job included; not after a switch that
                did not do what it promised. Steps below 0.1 s are measured several at a time; patience and min_stay
                then count measurements, not steps
    warm_up_steps: global steps of the job before gba is entered: early steps suffer most from old values
    trial_budget: share of the job's work that trials of the other mode may cost; 0: none are made
    """

    enter_gain: float = 1.01
    leave_gain: float = 0.99
    patience: int = 5
    min_stay: int = 20
    warm_up_steps: int = 0
    trial_budget: float = 0.02

    def __post_init__(self) -> None:
        if not 0 < self.leave_gain <= self.enter_gain < math.inf:
            raise BadInput(
                "leave_gain must be positive and not above enter_gain (or the job would switch back and forth), "
                f"got leave_gain={self.leave_gain} and enter_gain={self.enter_gain}"
            )
        if self.patience < 1 or self.min_stay < 0:
            raise BadInput(
                f"patience must be at least 1 step and min_stay not negative, got {self.patience} and {self.min_stay}"
            )
        if self.warm_up_steps < 0:
            raise BadInput(f"warm_up_steps must not be negative, got {self.warm_up_steps}")
        if not 0 <= self.trial_budget < 1:
            raise BadInput(f"trial_budget must be a share of the work, 0 to below 1, got {self.trial_budget}")


@dataclass(frozen=True)
class Decision:
    """The mode to be in from now on, and why.

    gain:           how many times as fast as allreduce gba is, by the two rates
    allreduce, gba: micro-batches/s; of the mode that the job is in as achieved, where that is measured; else predicted
    kind:           of the reason: "switch", or "trial", a switch to find out how fast the other mode is; or why it
                    stays: "gain" (the other mode is not fast enough), "patience", "cost", "min_stay" or "warm_up" (it
                    is, but not for long enough, it has cost too little so far, or it is too soon), or "awaited" (lost
                    workers may be replaced, for which gba does not stand still, as allreduce does)
    """

    mode: str
    reason: str
    gain: float
    allreduce: float
    gba: float
    kind: str

    @property
    def why(self) -> str:
        """The reason, without the words that say to which mode."""
        return self.reason.removeprefix(f"to {self.mode}").lstrip(": ")

    @property
    def is_switch(self) -> bool:
        return self.kind in ("switch", "trial")

    @property
    def is_trial(self) -> bool:
        return self.kind == "trial"


@dataclass(frozen=True)
class Record:
    """What a prediction of a mode, made in the other one, is worth.

    ratio: achieved by predicted rate, on the two sides of a switch. at_s: of that switch, in seconds of training; None:
    there was none yet, or other workers take part since
    """

    ratio: float = 1.0
    at_s: float | None = None


@dataclass(frozen=True)
class Left:
    """What was known when the mode before was left, from the same last steps in it.

    achieved: its micro-batches/s. predicted: those of the mode that was entered, without a correction
    seconds:  per micro-batch, by worker, when the new mode was first compared with it; (): it was not yet
    """

    achieved: float
    predicted: float
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True)
class Stance:
    """Where the job stands between decisions.

    mode:       "allreduce" or "gba"
    since_step: the step at which it was entered
    in_favour:  decisions in a row, the last one included, that would rather be in the other mode
    lost_s:     what the other mode would have done beside what was done, lately, in seconds of work
    n_lost:     decisions since that was last 0: what came before them was otherwise
    promised:   the rate for which the mode was entered, as a multiple of the other's; 0: it is the first mode
    since_s:    when it was entered, in seconds of training
    is_trial:   it was entered to find out how fast it is
    spent_s:    what trials have cost since the job began, in seconds of work
    left:       what the mode before leaves to compare with; None: nothing that can be relied on
    allreduce, gba: what predictions of them are worth
    """

    mode: str
    since_step: int
    in_favour: int = 0
    lost_s: float = 0.0
    n_lost: int = 0
    promised: float = 0.0
    since_s: float = 0.0
    is_trial: bool = False
    spent_s: float = 0.0
    left: Left | None = None
    allreduce: Record = Record()
    gba: Record = Record()

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> Stance:
        """From `dataclasses.asdict` of one; of an older version, in which nothing was learned yet, too."""
        left = (
            Left(**{**state["left"], "seconds": tuple(state["left"].get("seconds", ()))}) if state.get("left") else None
        )
        records = {mode: Record(**state[mode]) for mode in ("allreduce", "gba") if mode in state}
        return cls(**{**state, **records, "left": left})

    def record(self, mode: str) -> Record:
        return self.allreduce if mode == "allreduce" else self.gba

    def in_mode(self, mode: str, step: int) -> Stance:
        """When a mode is entered for another reason than a decision: nothing was promised.

        A trial that ends so has cost two switches at least; the cost of its steps was not measured.
        """
        spent_s = self.spent_s + (2 * SWITCH_S if self.is_trial else 0.0)
        return Stance(mode, step, spent_s=spent_s, allreduce=self.allreduce, gba=self.gba)

    def with_other_workers(self) -> Stance:
        """After a change of membership: ratios are a guess from now on, which the next stay replaces.

        What was promised, and what the other mode would have done, was of the workers before.
        """
        return replace(
            self, left=None, promised=0.0, in_favour=0, lost_s=0.0, n_lost=0,
            allreduce=Record(self.allreduce.ratio), gba=Record(self.gba.ratio),
        )  # fmt: skip


def decide(stance: Stance, step: int, rates: Rates, options: Options) -> tuple[Decision, Stance]:
    """Stay or switch, at global step `step`, and the stance for the next decision. To be called once per measurement.

    When the decision's mode is not the stance's, switch, and measure again: times taken in the other mode do not count.
    Raises BadInput when the job is in a mode that is never entered automatically.
    """
    known_mode(stance.mode, ("allreduce", "gba"))
    here, other = stance.mode, "gba" if stance.mode == "allreduce" else "allreduce"
    rate = _rates_of_both(stance, rates)
    gain = rate["gba"] / rate["allreduce"]
    favours_other = gain >= options.enter_gain if other == "gba" else gain < options.leave_gain
    needed = options.enter_gain if other == "gba" else 1 / options.leave_gain
    step_s = rates.n_micro / rate[here]
    lost_s = max(0.0, stance.lost_s + rates.steps * step_s * (rate[other] / rate[here] - needed))
    stayed = _stayed(stance, step, rates.steps)
    is_broken = stance.promised > 0 and rates.achieved is not None and rate[here] < (1 - BROKEN) * rate[other]
    if stance.is_trial and stayed >= options.min_stay and not favours_other:
        stance = replace(stance, is_trial=False, spent_s=stance.spent_s + _spent_s(stance, rates, rate))
    now = replace(
        stance, in_favour=stance.in_favour + 1 if favours_other else 0, lost_s=lost_s,
        n_lost=stance.n_lost + 1 if lost_s > 0 else 0,
    )  # fmt: skip

    def stay(kind: str, why: str) -> tuple[Decision, Stance]:
        return Decision(here, f"stay in {here}: {why}", gain, rate["allreduce"], rate["gba"], kind), now

    def switch(kind: str, why: str) -> tuple[Decision, Stance]:
        entered = Stance(
            other, step, promised=rate[other] / rate[here], since_s=rates.at_s, is_trial=kind == "trial",
            spent_s=stance.spent_s + _spent_s(stance, rates, rate), allreduce=stance.allreduce, gba=stance.gba,
        )  # fmt: skip
        return Decision(other, f"to {other}{why}", gain, rate["allreduce"], rate["gba"], kind), entered

    if rates.awaited and here == "gba":
        now = replace(now, in_favour=0, lost_s=0.0, n_lost=0)  # by the workers that are left
        lost = "a lost worker" if rates.awaited == 1 else f"{rates.awaited} lost workers"
        return stay("awaited", f"{lost} may come back, for which gba does not stand still")
    if not favours_other:
        if stayed >= options.min_stay and (cost_s := trial_cost_s(stance, step, rates, rate, options)) is not None:
            why = (
                f"{_multiple(here, gain, rates)}, which no switch of these workers has shown for {FORGET_S / 3600:g} h"
            )
            return switch("trial", f" as a trial: {why}; it costs {cost_s:.1f} s of work at most")
        words = f"enter at {options.enter_gain:.2f}x" if other == "gba" else f"leave below {options.leave_gain:.2f}x"
        return stay("gain", f"{_multiple(here, gain, rates)}{_correction(now, other)}, {words}")
    finding = f"{_slowest(rates, other)}{_prediction(other, gain, rates, options)}{_correction(now, other)}"
    rest, unit, lately = _rest(other, gain, rates), _unit(rates), _unit(rates, is_newest=True)
    if now.in_favour < options.patience:
        return stay("patience", f"{finding}, for {now.in_favour} of {options.patience} {lately}{rest}")
    if not stance.is_trial and now.lost_s < max(LOST_S, (options.patience - 1) * step_s):
        return stay("cost", f"{finding}, which has cost {now.lost_s:.2f} s of work so far{rest}")
    if stayed < options.min_stay and not is_broken:
        return stay("min_stay", f"{finding}, but only {stayed} of {options.min_stay} {unit} in {here}")
    if other == "gba" and step < options.warm_up_steps:
        return stay("warm_up", f"{finding}, but the warm-up takes {options.warm_up_steps} steps, this is {step}")
    return switch("switch", f": {finding}, for {now.in_favour} {lately}{rest}{_broken(stance, rate)}")


def trial_cost_s(stance: Stance, step: int, rates: Rates, rate: Mapping[str, float], options: Options) -> float | None:
    """What a trial of the other mode costs at most, in seconds of work; None: it is not worth one, or not allowed.

    rate: of both modes. A trial takes `min_stay` steps and two switches. Its cost is allowed while all trials together
    have cost no more than `trial_budget` of the job. It is worth one when the other mode was not tried lately, and
    would pay if it were `UNCERTAIN` faster than predicted.
    """
    here, other = stance.mode, "gba" if stance.mode == "allreduce" else "allreduce"
    record = stance.record(other)
    if rates.achieved is None or options.trial_budget <= 0 or (other == "gba" and step < options.warm_up_steps):
        return None
    if record.at_s is not None and rates.at_s - record.at_s < FORGET_S:
        return None
    plain = _plain(rates)[other]
    best, worst = plain * max(1.0, record.ratio) * (1 + UNCERTAIN), plain * min(1.0, record.ratio) * (1 - UNCERTAIN)
    gain = best / rate[here] if other == "gba" else rate[here] / best
    if gain < options.enter_gain if other == "gba" else gain >= options.leave_gain:
        return None
    steps_s = max(1, options.min_stay) * rates.steps * rates.n_micro / worst
    cost_s = steps_s * max(0.0, 1 - worst / rate[here]) + 2 * SWITCH_S
    return cost_s if stance.spent_s + cost_s <= options.trial_budget * rates.at_s else None


def is_compared(stance: Stance, step: int, options: Options, steps: float = 1.0) -> bool:
    """Whether there is more to learn from the last switch: what changes once the mode is not new has other causes.

    steps: as of `Rates`
    """
    return stance.left is not None and options.patience <= _stayed(stance, step, steps) <= N_RECENT


def learned(stance: Stance, step: int, rates: Rates, options: Options) -> Stance:
    """The stance, with what the last switch shows of predictions. rates: by all steps since.

    No more is learned once a worker is much slower or faster than right after the switch.
    """
    left, here, other = stance.left, stance.mode, "gba" if stance.mode == "allreduce" else "allreduce"
    if left is None or rates.achieved is None or not is_compared(stance, step, options, rates.steps):
        return stance
    first = left.seconds or rates.seconds_per_micro
    if len(first) != len(rates.seconds_per_micro) or any(
        not 1 / _CHANGED < now / then < _CHANGED for now, then in zip(rates.seconds_per_micro, first, strict=True)
    ):
        return replace(stance, left=None)
    useful = _useful(stance, rates)
    assert useful is not None
    found = {here: useful / left.predicted, other: left.achieved / _plain(rates)[other]}
    records = {mode: Record(ratio, rates.at_s) for mode, ratio in found.items()}
    return replace(stance, left=replace(left, seconds=first), allreduce=records["allreduce"], gba=records["gba"])


def leaving(entered: Stance, before: Stance, newest: Rates, alike: Rates, n_alike: int) -> Stance:
    """The stance after a switch, with what is known of both modes, if that can be compared with what comes after.

    before: the stance that is left. alike: by the last `n_alike` steps in it; newest: by the last few of these
    """
    now, then = _useful(before, newest), _useful(before, alike)
    if now is None or then is None or n_alike < COMPARED:
        return entered
    if not entered.is_trial and abs(now / then - 1) > _ALIKE:  # the cause of the switch is newer
        return entered
    return replace(entered, left=Left(then, _plain(alike)[entered.mode]))


def _rates_of_both(stance: Stance, rates: Rates) -> dict[str, float]:
    """Micro-batches/s: achieved, or predicted and corrected."""
    useful, plain = _useful(stance, rates), _plain(rates)
    rate = {mode: plain[mode] * stance.record(mode).ratio for mode in plain}
    return rate if useful is None else {**rate, stance.mode: useful}


def _unit(rates: Rates, is_newest: bool = False) -> str:
    """Of what is counted, a measurement each. is_newest: those before the newest may have been of other numbers."""
    return "steps" if rates.steps < 1.5 else f"measurements{', the newest' * is_newest} of {rates.steps:.0f} steps"


def _stayed(stance: Stance, step: int, steps: float) -> int:
    """Measurements in the mode."""
    return int((step - stance.since_step) / steps)


def _plain(rates: Rates) -> dict[str, float]:
    return {mode: max(rate, _LEAST) for mode, rate in zip(("allreduce", "gba"), predicted(rates), strict=True)}


def _useful(stance: Stance, rates: Rates) -> float | None:
    """Of what the job achieves, that which is not dropped."""
    if rates.achieved is None or stance.mode == "allreduce":
        return rates.achieved
    return max(rates.achieved * (1 - rates.dropped_share), _LEAST)


def _spent_s(stance: Stance, rates: Rates, rate: Mapping[str, float]) -> float:
    """What the trial cost that ends now, in seconds of work."""
    if not stance.is_trial:
        return 0.0
    other = "gba" if stance.mode == "allreduce" else "allreduce"
    return (rates.at_s - stance.since_s) * max(0.0, 1 - rate[stance.mode] / rate[other]) + 2 * SWITCH_S


def _slowest(rates: Rates, other: str) -> str:
    """Whom steps wait for; empty: for none in particular. A reason to enter gba, and none to return to allreduce."""
    found = _waited_for(rates)
    return f"although {found}" if found and other != "gba" else found


def _waited_for(rates: Rates) -> str:
    times, waits = rates.seconds_per_micro, rates.waits
    if rates.stopped and max(rates.stopped) >= _OFTEN:
        stops_most = max(range(len(times)), key=rates.stopped.__getitem__)
        return f"worker {stops_most} is stopped {rates.stopped[stops_most]:.0%} of the time, "
    worker = max(range(len(times)), key=times.__getitem__)
    if waits is not None and waits.worker != worker:  # slow at times: the newest times are not of these
        is_notable = waits.slowest_s >= _NOTABLE * waits.median_s
        return f"steps wait longest for worker {waits.worker}, " if is_notable else ""
    ratio, than = _ratio(times), "median" if len(times) > 2 else f"time of worker {1 - worker}"
    return f"worker {worker} takes {ratio:.1f}x the {than}, " if ratio >= _NOTABLE else ""


def _ratio(times: Sequence[float]) -> float:
    """Of the slowest worker to the others."""
    # The median of two is the mean of both: under 2x, however slow the one is.
    return max(times) / (min(times) if len(times) == 2 else median(times))


def _rest(other: str, gain: float, rates: Rates) -> str:
    """What a step consists of, where the slowest worker's mean does not explain how much faster gba is predicted."""
    waits = rates.waits
    if other != "gba" or waits is None or gain < _EXPLAINED * _ratio(rates.seconds_per_micro):
        return ""
    return (
        f"; of a step {1000 * waits.median_s:,.1f} ms are the median worker's, "
        f"{1000 * (waits.slowest_s - waits.median_s):,.1f} ms waiting for the slowest one (worker {waits.worker} in "
        f"{waits.n_slowest} of {waits.n_steps} steps), {1000 * rates.exchange_s:,.1f} ms the exchange"
    )


def _multiple(mode: str, gain: float, rates: Rates) -> str:
    if mode == "gba" and rates.achieved is not None:
        return f"gba is {gain:.2f}x as fast as allreduce is predicted"
    return f"gba predicted {gain:.2f}x as fast"


def _prediction(other: str, gain: float, rates: Rates, options: Options) -> str:
    """With the limit that it passed."""
    drops = f" with {rates.dropped_share:.1%} dropped as stale" if rates.dropped_share else ""
    if other == "gba":
        return f"predicted {gain:.2f}x as fast{drops}, above the {options.enter_gain:.2f}x it is entered for"
    return f"{_multiple('gba', gain, rates)}{drops}, below the {options.leave_gain:.2f}x it is kept for"


def _correction(stance: Stance, other: str) -> str:
    record = stance.record(other)
    return f" ({other} was {record.ratio:.2f}x its prediction before)" if abs(record.ratio - 1) >= 0.005 else ""


def _broken(stance: Stance, rate: Mapping[str, float]) -> str:
    if not stance.promised:
        return ""
    other = "gba" if stance.mode == "allreduce" else "allreduce"
    entered = "tried at" if stance.is_trial else "promised"
    return f"; {stance.mode} was {entered} {stance.promised:.2f}x, and is {rate[stance.mode] / rate[other]:.2f}x"
