"""`GBACallback`: which mode the job should be in. Measures, asks `policy.decide`, and stores the operator's request.

It only makes requests: the chief's request travels with the commit of a step (allreduce) or to the coordinator
(asynchronous modes), and all workers carry it out at the same step (`enter_ps`, `leave_ps`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from inspect import signature
from statistics import median
from typing import Any

from gba_hvd.averaging.algorithms import Averaging
from gba_hvd.callbacks import Callback, StepRecord
from gba_hvd.epoch import shares
from gba_hvd.errors import BadInput
from gba_hvd.mode_names import BY_NAME, RECORDS, REPLICA_MODES, SETTINGS, known_mode
from gba_hvd.ps.coordinator.discipline import Discipline, StalenessOf
from gba_hvd.ps.messages import WIRES, Wire
from gba_hvd.switching.decision_reports import DecisionReports
from gba_hvd.switching.idle_options import idle, idle_settings
from gba_hvd.switching.measurements import (
    N_NEWEST,
    N_RECENT,
    LostWorkers,
    RecentCost,
    RecentRate,
    RecentTimes,
    mean_times,
    neighbours,
)
from gba_hvd.switching.policy import Decision, Options, Stance, decide, is_compared, learned, leaving
from gba_hvd.switching.predictions import Rates, expected_drops, expected_old_values
from gba_hvd.switching.requested_mode import AskedMode
from gba_hvd.switching.short_steps import Reading, ShortSteps, Steps
from gba_hvd.update_rules import check, known_rule, known_settings, look_ahead
from gba_hvd.update_rules.default_rule import RuleChoice, choose
from gba_hvd.update_rules.delay_model import expected_ages, expected_arrivals
from gba_hvd.update_rules.momentum import Momentum
from gba_hvd.update_rules.stability import advise
from recovery.old_names import warn

_N_RECENT = 9
_LATE_STEPS = 10  # an asynchronous mode learns of steps a little later; more than that is reported
_PAUSE_STEPS = 20
_REQUIRED_WAIT_S = 60.0
_FIRST_SERVE_S = 0.003  # what a lease and a push cost, until it was measured


class GBACallback(Callback):
    """Switches a running job between allreduce and asynchronous modes. Register the same on every worker.

    mode:       "auto" (allreduce or gba, whichever measurements say is faster), or a mode to be in:
                "allreduce", "gba"; "shadow" (replicas that are synchronised in the background), or "easgd", "ma",
                "bmuf" (the same in the foreground); or one of the baselines "async", "bsp", "hop_bs", "hop_bw"
    rule:       how servers update dense parameters with gradients that come late, see `gba_hvd.update_rules`. None:
                "look_ahead" in gba where the dense optimizer has momentum (SGD with momentum, Adam, AdamW), else
                "none", see `gba_hvd.update_rules.default_rule`. "none": the optimizer alone, gba as published.
                Allreduce knows no delay: there the optimizer steps, and the rule waits for an asynchronous mode.
                Replicas know none either: a job that is to be in such modes only has no rule
    rule_settings: of "dc" and "dana_dc", see `gba_hvd.update_rules.delay_compensation.DEFAULTS`; of "dana_dc" also
                `to_look_ahead`, see `gba_hvd.update_rules.dana_dc`; of "look_ahead", `steps`
    staleness, tolerance, staleness_of, lookahead, slack, backups: see `gba_hvd.ps.coordinator.discipline.Discipline`.
                tolerance: the paper's iota
    enter_gain, leave_gain, patience, min_stay, warm_up_steps, trial_budget: see `gba_hvd.switching.policy.Options`
    switch_at:  modes to change to at given global steps, e.g. {1000: "gba"}
    curvature:  largest curvature of the loss (`gba_hvd.update_rules.stability.largest_curvature`), if known: an
                asynchronous mode without replicas in which the learning rate is predicted unstable at the expected ages
                of dense values is then warned of: by "auto" in the reason of the switch, else when the workers' speeds
                are known (event `rate_unstable`). With Adam and its kind, that of the preconditioned loss
    sync:       what "shadow" runs in the background: "easgd", "ma", "bmuf"; "none" to compare
    elasticity, block_rate, mixing, pause_s: see `gba_hvd.averaging.algorithms.Averaging`. elasticity=None: 1 in the
                modes "ma" and "bmuf", which is plain averaging, else 0.5
    every:      local steps between the rounds of the modes "easgd", "ma", "bmuf", which training waits for
    servers_per_host: companion processes on each host; shards and dense parameters are spread over them
    wire:       how workers and servers of different hosts talk: encrypted by "curve" or "tls", or "plain", which gives
                neither secrecy nor integrity on the network: for networks that no other party can read or write. With
                each, only processes that hold the job's key are let in (docs/MODES.md, "The wire")
    wait_s:     how long training stands still when a mode is to be entered and the servers are not up (after the first
                time without success it does not wait again); 0: never, allreduce continues until they are. By default
                60 with `required`, else 0
    required:   a mode that was asked for and cannot be entered fails the job, with the servers' own words; otherwise
                the job continues in allreduce and warns

    Raises BadInput for a mode, rule or setting that does not exist, for a rule that no mode would use, for `required`
    where no asynchronous mode is asked for, and when it is registered for a job whose optimizer the rule does not go
    with.
    """

    def __init__(
        self,
        mode: str = "auto",
        *,
        rule: str | None = None,
        rule_settings: Mapping[str, float | bool] | None = None,
        staleness: str = "threshold",
        tolerance: int = 4,
        staleness_of: StalenessOf = "token",
        lookahead: int | None = None,
        slack: int = 2,
        backups: int = 1,
        enter_gain: float = Options.enter_gain,
        leave_gain: float = Options.leave_gain,
        patience: int = Options.patience,
        min_stay: int = Options.min_stay,
        warm_up_steps: int = Options.warm_up_steps,
        trial_budget: float = Options.trial_budget,
        switch_at: Mapping[int, str] | None = None,
        curvature: float | None = None,
        servers_per_host: int = 1,
        wire: Wire = "curve",
        sync: str = "easgd",
        elasticity: float | None = None,
        block_rate: float = 0.9,
        mixing: str = "interpolate",
        every: int = 30,
        pause_s: float = 0.02,
        wait_s: float | None = None,
        required: bool = False,
    ) -> None:
        self.mode = known_mode(mode)
        if staleness == "gap_aware" and rule not in (None, "gap_aware"):
            raise BadInput(
                f"staleness='gap_aware' is the rule 'gap_aware', and a job has one rule, got rule={rule!r}, too: leave "
                "one of them out (staleness='none' counts every gradient in full)"
            )
        # What a staleness of that name asks for is a rule; what it does not do is drop.
        asked = "gap_aware" if staleness == "gap_aware" else rule
        self.requested_rule = None if asked is None else known_rule(asked)  # None: the default
        self.switch_at = {int(step): known_mode(name) for step, name in (switch_at or {}).items()}
        if rule_settings and self.requested_rule is None:
            raise BadInput(
                f"rule_settings={dict(rule_settings)} are of a rule that is named, such as rule='look_ahead' or "
                "rule='dc': name it, or leave them out"
            )
        self.rule_settings = known_settings(self.requested_rule or "none", rule_settings or {})
        self._has_dense = True
        self._optimizer: Mapping[str, Any] | None = None  # as of `torch_optimizers.spec_of`, once it is known
        self._refuse_an_idle_rule()
        self.asked = AskedMode(self.mode, self.switch_at)
        self._asked_for = self.mode  # `mode` is what an operator or a plan made of it
        if wait_s is not None and not 0 <= wait_s < float("inf"):
            raise BadInput(f"wait_s is a number of seconds, 0 or more, got {wait_s}")
        self.required = required
        self.wait_s = (_REQUIRED_WAIT_S if required else 0.0) if wait_s is None else float(wait_s)
        self._has_waited = False
        self._refuse_requiring_nothing()
        if servers_per_host < 1:
            raise BadInput(f"servers_per_host must be at least 1, got {servers_per_host}")
        if wire not in WIRES:
            raise BadInput(f"wire is one of {', '.join(map(repr, WIRES))}, got {wire!r}")
        self.servers_per_host, self.wire, self.curvature = servers_per_host, wire, curvature
        self.lr = 0.0  # the largest of the dense groups, set by the engine
        self.momentum = Momentum()  # set with the optimizer
        self._rules: dict[str, Any] = {
            "staleness": staleness, "tolerance": tolerance, "staleness_of": staleness_of, "lookahead": lookahead,
            "slack": slack, "backups": backups,
        }  # fmt: skip
        self.discipline("gba")  # refuses bad settings now
        self._elasticity = elasticity
        share = Averaging.elasticity if elasticity is None else elasticity
        self._background = Averaging(sync, share, block_rate, mixing, None, pause_s)
        self._every = replace(self._background, every=every).every
        self.options = Options(enter_gain, leave_gain, patience, min_stay, warm_up_steps, trial_budget)
        self._arguments = {
            **self._rules, **asdict(self.options), "sync": sync, "elasticity": elasticity, "block_rate": block_rate,
            "mixing": mixing, "every": every, "pause_s": pause_s, "curvature": curvature,
        }  # fmt: skip
        self._refuse_idle_options()
        self._refuse_compensation_without_delay()
        self._stance = Stance("allreduce", 0)
        self._entered: Stance | None = None  # the stance of the switch that is requested
        self._recent, self._achieved = RecentTimes(), RecentRate()
        self._single = RecentTimes()  # the same of each step, where a reading is of several
        self._short_steps = ShortSteps()
        self._steps: deque[int] = deque(maxlen=N_NEWEST)  # of each reading
        self._looked_at = -1  # the step, in gba
        self._lost, self.n_awaited = LostWorkers(), 0
        self._trained_s = 0.0  # in modes among which it decides
        self._exchange, self._wait = RecentCost(0.0), RecentCost(_FIRST_SERVE_S)
        self._batch_gains: deque[float] = deque(maxlen=_N_RECENT)
        self._request: tuple[str, str] | None = None
        self._warned = ""  # of the mode that is requested
        self._asked_why = ""  # an operator's reason for `mode`
        self._checked_rate = ""  # the mode in which it is known whether the learning rate is stable
        self._first_mode = self.mode  # until a change is due
        self._handled = -1  # the newest step of `switch_at` that has come
        self.late: tuple[int, int] | None = None  # of `switch_at`: when a change was due, and when it is requested
        self.last: Decision | None = None
        self.decided_at_step = -1  # that one
        self._has_switched, self._switched_to = False, ""
        self.decisions = DecisionReports(patience)
        self._not_before, self._pause, self._switched_at = 0, _PAUSE_STEPS, 0

    def discipline(self, mode: str) -> Discipline:
        """How the coordinator hands out work and makes steps in this mode, with the rule and weighting of this
        callback.
        """
        return Discipline(name=mode, **self._rules)

    @property
    def modes_to_come(self) -> list[str]:
        """Asynchronous modes that the job is to be in, as far as is known beforehand."""
        modes = {"gba" if mode == "auto" else mode for mode in (self.mode, *self.switch_at.values())}
        return sorted(modes - {"allreduce"})

    @property
    def weighs_by_values(self) -> bool:
        """Whether gradients are weighed by the age of the dense values that they were computed with."""
        return bool(self._rules["staleness_of"] == "values")

    @property
    def asks_for_allreduce(self) -> bool:
        """Whether some mode that it was made with is, or may be, allreduce."""
        return bool({self._asked_for, *self.switch_at.values()} & {"auto", "allreduce"})

    @property
    def has_rule(self) -> bool:
        """Whether a rule other than "none" was asked for."""
        return self.requested_rule not in (None, "none")

    def check_fits(self, optimizer: Mapping[str, Any], has_dense: bool = True) -> None:
        """Take note of the job's optimizer (`torch_optimizers.spec_of`), by which the default rule goes.

        Raises BadInput when the rule that was asked for does not go with it.
        """
        if self.requested_rule is not None:
            check(self.requested_rule, optimizer)
        self._optimizer, self._has_dense, self.momentum = optimizer, has_dense, Momentum.of(optimizer)

    def rule_in(self, mode: str) -> RuleChoice:
        """The update rule of an asynchronous mode, for the optimizer of which note was taken."""
        return choose(self.requested_rule, mode, self._optimizer, self._rules["lookahead"], self._has_dense)

    @property
    def rule(self) -> str:
        """Name of the rule that the job reports: that of gba, or of another mode if only such are asked for."""
        return self._reported_rule.rule

    @property
    def rule_reason(self) -> str:
        """Why it is that one."""
        return self._reported_rule.reason

    @property
    def _reported_rule(self) -> RuleChoice:
        asked = {self._asked_for, *self.switch_at.values()}  # not `mode`, which changes while the job runs
        others = sorted(asked - {"auto", "gba", "allreduce"})
        by_gba = self.requested_rule is not None or not others or bool(asked & {"auto", "gba"})
        return self.rule_in("gba" if by_gba else others[0])

    def averaging(self, mode: str) -> Averaging:
        """How replicas are synchronised in one of `mode_names.REPLICA_MODES`."""
        if mode == "shadow":
            return self._background
        foreground = replace(self._background, algorithm=mode, every=self._every)
        is_plain = self._elasticity is None and foreground.is_collective
        return replace(foreground, elasticity=1.0) if is_plain else foreground

    def describe(self) -> dict[str, Any]:
        """The settings by the names of their arguments, as it was made with them; defaults are of its mode."""
        switch_at = {str(step): mode for step, mode in self.switch_at.items()}
        rounds = self.rounds
        rounds["sync"] = rounds.pop("algorithm")
        replicas = [mode for mode in (self._asked_for, *self.switch_at.values()) if mode in REPLICA_MODES]
        rounds["elasticity"] = self.averaging(replicas[0]).elasticity if replicas else self._background.elasticity
        more = {"switch_at": switch_at, "servers_per_host": self.servers_per_host, "curvature": self.curvature}
        more |= {"wire": self.wire, "wait_s": self.wait_s, "required": self.required}
        more |= {"rule_settings": dict(self.rule_settings)}
        reported = {"mode": self._asked_for, "rule": self.rule}
        return {**reported, **self._rules, **asdict(self.options), **rounds, **more}

    @property
    def agreed(self) -> dict[str, Any]:
        """What must be the same on all workers before they form a world."""
        more: dict[str, Any] = {"wait_s": self.wait_s, "required": self.required}
        more |= {f"rule_settings.{name}": value for name, value in self.rule_settings.items()}
        if self.wire != "curve":  # memory of earlier versions does not name it
            more["wire"] = self.wire
        # Memory of earlier versions says "none" where no rule was asked for; so the default keeps that word.
        rule = {None: "none", "none": "none, as asked for"}.get(self.requested_rule, self.requested_rule)
        return {"servers_per_host": self.servers_per_host, "rule": rule, **self.rounds, **more}

    @property
    def compared(self) -> dict[str, Any]:
        """The settings that must be the same on all workers, by the names of their arguments.

        Not `curvature`, which a worker may have measured with data of its own.
        """
        settings = {**self.describe(), "rule": self.requested_rule or "the default"}
        settings["elasticity"] = "the default" if self._elasticity is None else self._elasticity
        del settings["curvature"]
        return settings

    @property
    def paused_until(self) -> int:
        """The step before which no switch is requested, after one that failed."""
        return self._not_before

    def pause_in_words(self, step: int) -> str:
        return f"tried again after {self.paused_until - step} steps or more"

    @property
    def waits(self) -> bool:
        """Whether training stands still for servers that are not up."""
        return self.wait_s > 0 and not self._has_waited

    @property
    def rounds(self) -> dict[str, Any]:
        """What all workers' rounds must have in common."""
        rounds = {**asdict(self._background), "every": self._every}
        # Memory of earlier versions has the background's where none was asked for; so the default keeps that number.
        is_asked = self._elasticity == Averaging.elasticity
        return rounds | {"elasticity": f"{self._elasticity}, as asked for"} if is_asked else rounds

    def _refuse_an_idle_rule(self) -> None:
        """Every worker steps its replica at once: a rule is of use only where another mode is planned for later."""
        is_used_later = bool({*self.switch_at.values()} - {*REPLICA_MODES, "allreduce"})
        if self.has_rule and self.mode in REPLICA_MODES and not is_used_later:
            raise BadInput(
                f"mode {self.mode!r} uses no rule, got {self.requested_rule!r}: each worker steps a replica of its own "
                "at once, so no dense gradient comes late. Leave `rule` out (staleness='gap_aware' is one too), or "
                "choose a mode such as 'gba' or 'async'"
            )

    def names(self, mode: str) -> bool:
        """Whether the job is to be in this mode by what it was made with, not by an operator's request alone."""
        asked = {self._asked_for, *self.switch_at.values()}
        return mode in asked or ("auto" in asked and mode in ("allreduce", "gba"))

    def idle_options(self, modes: Iterable[str]) -> dict[str, str]:
        """Options that were given, and that none of these modes uses; of each, what would use it."""
        parameters = signature(GBACallback).parameters
        return idle(modes, self._arguments, {name: parameters[name].default for name in self._arguments})

    @property
    def idle_settings(self) -> set[str]:
        """Names of the settings that no mode uses which it was made with."""
        return idle_settings([self._asked_for, *self.switch_at.values()], self._arguments)

    def settings_first_used_in(self, mode: str) -> list[str]:
        """Of those, what this mode uses, which is entered on an operator's request."""
        entered = {mode, self.mode} if self.mode == "auto" else {mode}
        return sorted(self.idle_settings - idle_settings(entered, self._arguments))

    def _refuse_idle_options(self) -> None:
        """Of a job that names no asynchronous mode, any may be meant for what an operator requests: auto, or a mode."""
        named = [self.mode, *self.switch_at.values()]
        found = self.idle_options(named if self.modes_to_come else SETTINGS)
        for name, why in found.items():
            modes = ", ".join(map(repr, dict.fromkeys(named)))
            raise BadInput(
                f"{name}={self._arguments[name]!r} has no effect in mode {modes}: {why}. Leave {name} out, or name a "
                "mode that uses it (mode=, or switch_at= for a later step)"
            )

    def _refuse_compensation_without_delay(self) -> None:
        """In lock-step every gradient is computed with the newest values."""
        modes = {*self.modes_to_come}
        if self.weighs_by_values and self._rules["lookahead"] == 0:
            raise BadInput(
                "staleness_of='values' has no effect with lookahead=0: in lock-step no values are old; leave one of "
                "them out"
            )
        follow = {mode.name for mode in RECORDS if mode.has_replicas or "lookahead" in mode.options}
        is_in_lock_step = self._rules["lookahead"] == 0 and bool(modes) and modes <= follow
        if is_in_lock_step and self.requested_rule in ("dc", "look_ahead", "gap_aware", "staleness_lr"):
            raise BadInput(
                f"rule {self.requested_rule!r} is of no use with lookahead=0: in lock-step no gradient comes late. "
                "Leave the rule out, or the lookahead"
            )

    def _refuse_requiring_nothing(self) -> None:
        if self.required and not {self.mode, *self.switch_at.values()} - {"auto", "allreduce"}:
            raise BadInput(
                f"required=True is for a mode that is asked for, such as 'gba', mode {self.mode!r} is content with "
                "allreduce: leave it out, or choose a mode"
            )

    def overdue(self, step: int) -> list[int]:
        """Steps of `switch_at` up to this one for which no change was requested. On the chief."""
        return [at for at in sorted(self.switch_at) if self._handled < at <= step]

    def override_plan(self, step: int) -> bool:
        """An operator has asked for a mode: whether a change was planned up to this step, and is not requested now."""
        passed = self.overdue(step)
        if passed:
            self._handled = passed[-1]
        self.asked.override_plan(step)
        return bool(passed)

    def mode_at_start(self, step: int, current: str) -> str:
        """The mode that the job starts in, in words, and what is to come after it."""
        since = self._stance.since_step if self._stance.mode == current else step
        earliest = max(since + self.options.min_stay, self.options.warm_up_steps)
        auto = (
            f"gba when measurements predict {self.options.enter_gain:.2f} times the speed or more, from step "
            f"{earliest:,} on"
        )
        return self.asked.at_start(current, auto, self.wait_s)

    # --- asked by the engine of the chief ----------------------------------------------------------------------------

    def mode_request(self, step: int, current: str) -> tuple[str, str] | None:
        """(mode, reason) to change to once `step` is applied, or None."""
        if step < self._not_before:
            return None
        due = [at for at in sorted(self.switch_at) if self._handled < at <= step]
        if due:
            self._handled = due[-1]
            is_late = step - due[-1] >= _LATE_STEPS and self.switch_at[due[-1]] not in (current, "auto")
            self.late = (due[-1], step) if is_late else None  # (a new chief finds what another has asked for)
            self.pin(self.switch_at[due[-1]])
        if self.mode == "auto":
            if current not in ("allreduce", "gba"):
                return None if self.n_awaited else ("allreduce", "auto was asked for: it measures allreduce first")
            return self._request if self._request is not None and self._request[0] != current else None
        return None if self.mode == current else (self.mode, self._asked_why or f"mode {self.mode!r} was asked for")

    def wish(self, step: int, current: str) -> tuple[str, str] | None:
        """The old name of `mode_request`. Warns."""
        warn("GBACallback.wish", "GBACallback.mode_request")
        return self.mode_request(step, current)

    def pin(self, mode: str, reason: str = "") -> None:
        """Be in this mode from now on; "auto" returns to deciding by measurements. reason: of the request."""
        self.mode, self._request, self._asked_why = known_mode(mode), None, reason
        self.asked.now = mode

    def measured_allreduce(
        self, step: int, seconds: Sequence[float], step_s: float, n_micro: int, together: int = 1,
        is_sample: bool = False, is_chief: bool = True,
    ) -> None:  # fmt: skip
        """Every worker's seconds per micro-batch in one step (0: it had none), and what the step took.

        together: micro-batches that were one batch. is_sample: usually they are more; this step was to measure how
        long single ones take. Until there was one, nothing is decided. is_chief: others request nothing, and so
        decide nothing; one that becomes the chief begins with the next step.
        """
        self._trained_s += step_s
        if is_sample:
            usual = [self._single.median(worker) for worker in range(len(seconds))]
            gain = self._batch_gain
            found = [before * gain / t for before, t in zip(usual, seconds, strict=True) if before and t > 0]
            if found and not self._batch_gains:
                self._single = RecentTimes()  # from here on they are of single ones
            if found:
                self._batch_gains.append(median(found))
            return
        shared = shares(n_micro, len(seconds), together)
        slowest_s = max(n * t for n, t in zip(shared, seconds, strict=True))
        self._exchange.add(max(0.0, step_s - slowest_s), self._trained_s)
        if together > 1 and not self._batch_gains:
            self._single.add(seconds)  # as they come, until it is known what single ones take
            return
        gain = self._batch_gain if together > 1 else 1.0
        if not is_chief:
            self._single.add([t / gain for t in seconds])
            return
        done = tuple((n, n * t) for n, t in zip(shared, seconds, strict=True))
        self._measure(step, "allreduce", [t / gain for t in seconds], Steps(1, n_micro, step_s, done), shared, gain)

    def measured_async(
        self, step: int, seconds: Sequence[float], n_micro: int, serve_s: float, together: int = 1,
        n_pushed: int = 0, elapsed_s: float = 0.0, done: Sequence[tuple[int, float]] = (),
    ) -> None:  # fmt: skip
        """Every worker's newest seconds per micro-batch, once per step; serve_s: this worker's lease, pull and push.

        seconds: 0 of a worker that has pushed none since the last call. together: micro-batches that are one batch in
        allreduce mode. n_pushed: micro-batches of all workers since the last call, elapsed_s ago; 0 s: it is the first
        done: of each, how many, and their seconds in all; (): only the newest are known
        """
        self._trained_s += elapsed_s
        self._wait.add(serve_s, self._trained_s)
        gain = self._batch_gain if together > 1 else 1.0
        known = tuple(done) or tuple((int(t > 0), t) for t in seconds)
        n_steps = max(1, step - self._looked_at) if self._looked_at >= 0 else 1
        self._looked_at = step
        self._measure(
            step,
            "gba",
            seconds,
            Steps(n_steps, n_pushed, elapsed_s, known, is_look=True),
            shares(n_micro, len(seconds), together),
            gain,
        )

    def workers_train(self, n: int, is_forming: bool, now_s: float) -> None:
        """Where workers have servers, as of `LostWorkers.look`. On all workers: any may become the chief."""
        self.n_awaited = self._lost.look(n, is_forming, now_s)
        if self.n_awaited:
            self._request = self._entered = None  # decided with those that are gone

    @property
    def _batch_gain(self) -> float:
        """Seconds per micro-batch in a large batch, as a share of those of single ones; 1 while that is not known."""
        return median(self._batch_gains or [1.0])

    def _measure(
        self, step: int, current: str, seconds: Sequence[float], measured: Steps, shared: Sequence[int], gain: float
    ) -> None:
        """seconds: per micro-batch, where each is its own batch. gain: the share of them it takes in allreduce mode."""
        if self.mode != "auto" or len(seconds) < 1:
            return
        self._single.add(seconds)
        if not measured.elapsed_s:  # a first look at what others have pushed
            self._recent.add(seconds)
        elif (reading := self._short_steps.add(measured)) is not None:
            self._add(reading, gain if current == "allreduce" else 1.0)
        else:
            return
        n_micro = sum(shared)
        rates = self._rates(current, shared, n_micro, gain)
        if rates is None:
            return
        if self._stance.mode != current:
            self._stance = self._stance.in_mode(current, step)
        if (
            is_compared(self._stance, step, self.options, rates.steps)
            and (full := self._rates(current, shared, n_micro, gain, N_RECENT)) is not None
        ):
            self._stance = learned(self._stance, step, full, self.options)
        decision, stance = decide(self._stance, step, rates, self.options)
        self.last, self.decided_at_step = decision, step
        self.decisions.add(decision)
        if decision.mode != current:
            if self._request is None or self._request[0] != decision.mode:
                self._warned = self._warning(rates, "gba") if decision.mode == "gba" else ""
            self._request = decision.mode, decision.why + self._warned  # the stance changes when the switch is done
            n_alike = N_RECENT if decision.is_trial else min(N_RECENT, self._stance.n_lost + 1)
            alike = self._rates(current, shared, n_micro, gain, n_alike)
            assert alike is not None
            self._entered = leaving(stance, self._stance, rates, alike, n_alike)
        else:
            self._stance, self._request, self._entered = stance, None, None

    def _rates(
        self, current: str, shared: Sequence[int], n_micro: int, gain: float, last: int = N_NEWEST
    ) -> Rates | None:
        """By so many of the newest measurements; None until every worker has been measured."""
        steps = sum(self._steps) / len(self._steps) if self._steps else 1.0
        times, now_s = self._recent.times(last), self._trained_s
        each = self._single.times(N_RECENT if steps > 1 else last)
        if times is None or each is None:
            return None
        draws = each if current == "allreduce" else neighbours(each, shared)
        stopped, achieved = self._short_steps.stopped(), self._achieved.value(last)
        means = mean_times(times)
        rates = Rates(
            tuple(t / (1 - share) for t, share in zip(means, stopped.workers or (0.0,) * len(means), strict=True)),
            tuple(shared), n_micro, self._exchange.value(now_s), self._wait.value(now_s), sync_share=gain, draws=draws,
            achieved=None if achieved is None else achieved * (1 - stopped.steps), at_s=now_s,
            waits=self._single.waits(shared, gain) if current == "allreduce" else None,
            stopped=stopped.workers, steps=steps, awaited=self.n_awaited,
        )  # fmt: skip
        if self._rules["staleness"] == "threshold":
            tolerance, by_values = self._rules["tolerance"], self.weighs_by_values
            dropped = expected_old_values(rates, tolerance) if by_values else expected_drops(rates, tolerance)
            rates = replace(rates, dropped_share=dropped)
        return rates

    def unstable_rate(self, mode: str, seconds: Sequence[float], n_micro: int, serve_s: float) -> str:
        """Why the learning rate is predicted unstable in a mode that the job is in; empty: it is not, or not known.

        Found out once, when there is a time for every worker. seconds: per micro-batch, of each; n_micro: M
        """
        if self.curvature is None or self.lr <= 0 or self._checked_rate == mode or not seconds or min(seconds) <= 0:
            return ""
        self._checked_rate = mode
        step_of = BY_NAME[mode].step_of
        assert step_of is not None
        pushes = {"batch": n_micro, "push": 1, "round": max(1, len(seconds) - self._rules["backups"])}[step_of]
        rates = Rates(tuple(seconds), tuple(shares(pushes, len(seconds))), pushes, 0.0, serve_s)
        return self._warning(rates, mode).removeprefix("; warning: ")

    def _warning(self, rates: Rates, mode: str) -> str:
        """What the expected age of dense values would do to stability; empty: all is well, or the curvature unknown."""
        if self.curvature is None or self.lr <= 0:
            return ""
        cycles = [t + rates.serve_s for t in rates.seconds_per_micro]
        ages, arrivals = expected_ages(cycles, rates.n_micro), expected_arrivals(cycles, rates.n_micro)
        ahead = look_ahead.steps_of(self.rule_in(mode).rule, self.rule_settings)
        advice = advise(
            self.lr, self.curvature, ages, self.momentum.value, careful=False, arrivals=arrivals, ahead=ahead,
            dampening=self.momentum.dampening,
        )  # fmt: skip
        return "" if advice.is_stable else f"; warning: {advice.reason}"

    def failed(self, step: int, why: str) -> None:
        """A switch could not be done, or servers refused to train after it: no other is requested so soon, and later
        ever less often, until a mode with servers has lasted `_PAUSE_STEPS` steps.
        """
        self._has_waited, self.asked.obstacle = True, why
        self._not_before, self._pause = step + self._pause, 2 * self._pause
        self._request = None

    def switched(self, mode: str, step: int) -> None:
        """The job is in `mode` from `step` on."""
        entered, self._entered, self._has_switched = self._entered, None, True
        self._request, self._not_before, self._switched_at, self._switched_to = None, 0, step, mode
        self._forget_times()
        self._lost, self.n_awaited = LostWorkers(), 0
        self._checked_rate, self._warned = mode if self._warned else "", ""
        if entered is not None and entered.mode == mode:
            self._stance = replace(entered, since_step=step)
        elif mode in ("allreduce", "gba"):  # by a plan or an operator: nothing was promised
            self._stance = self._stance.in_mode(mode, step)

    @property
    def current_decision(self) -> Decision | None:
        """The newest decision; None where the job has left the mode that it was for, or is not in mode "auto"."""
        last = self.last
        if last is None or self.mode != "auto":
            return None
        is_carried_out = last.is_switch and last.mode == self._switched_to
        return last if is_carried_out or self.decided_at_step > self._switched_at else None

    def why_never_switched(self, obstacle: str = "") -> str:
        """Why this launch has kept the mode that it began in; empty where it has switched, or is not in mode "auto".

        obstacle: why a mode that is requested is not on at the end; empty: nothing is known to be in its way
        """
        if self.mode != "auto" or self._has_switched:
            return ""
        if self.last is None:
            return "no decision was made, since the speed of every worker is measured first"
        if self.last.is_switch:
            if self.decided_at_step < self._not_before:
                obstacle = f"it was tried before ({self.asked.obstacle}), and again from step {self._not_before:,} on"
            why = obstacle or "the job ended first"
            return f"the last decision was not carried out before the end: {self.last.reason}; not carried out: {why}"
        return self.last.reason.removeprefix(f"stay in {self.last.mode}: ")

    def _forget_times(self) -> None:
        self._recent, self._achieved = RecentTimes(), RecentRate()
        self._single, self._looked_at = RecentTimes(), -1
        self._steps.clear()
        self._short_steps.changed_mode()

    def _add(self, reading: Reading, gain: float) -> None:
        self._recent.add([t / gain for t in reading.seconds])
        self._achieved.add(reading.n_micro, reading.elapsed_s)
        self._steps.append(reading.n_steps)

    def rolled_back(self, step: int) -> None:
        """The job is at this earlier step again (full recovery): what `switch_at` has after it comes again.

        What an operator asked for stays, unless a change of `switch_at` came after it, which is undone.
        """
        if any(step < at <= self._handled for at in self.switch_at):
            due = [at for at in sorted(self.switch_at) if at <= step]
            self._handled = due[-1] if due else -1
            self.pin(self.switch_at[due[-1]] if due else self._first_mode)
        self._stance = replace(self._stance, since_step=min(step, self._stance.since_step))
        self._not_before = min(self._not_before, step + self._pause)
        self.asked.rolled_back(step)

    def on_job(self, job: Any) -> None:
        self.members_changed()  # ranks may mean other workers now

    def members_changed(self) -> None:
        """Times of those that left go, and what was learned with them is a guess from now on."""
        self._short_steps = ShortSteps()
        self._forget_times()
        self._stance = self._stance.with_other_workers()
        self._request = self._entered = None  # decided by them

    def on_step(self, record: StepRecord) -> None:
        self.asked.step(record.step, record.mode)
        if record.mode != "allreduce" and record.step >= self._switched_at + _PAUSE_STEPS:
            self._pause = _PAUSE_STEPS

    def state_dict(self) -> dict[str, Any]:
        stance, asked = asdict(self._stance), self.asked.state()
        gains = list(self._batch_gains)
        return {
            "mode": self.mode, "stance": stance, "handled": self._handled, "asked": asked, "batch_gains": gains,
            "trained_s": self._trained_s,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Checkpoints of older versions have no `asked`, no `trained_s` and a stance in which nothing was learned."""
        self.mode, self._stance, self._handled = state["mode"], Stance.load(state["stance"]), state["handled"]
        if "asked" in state:
            self.asked.load(state["asked"])
        self._batch_gains.extend(state.get("batch_gains", ()))
        self._trained_s = state.get("trained_s", 0.0)
