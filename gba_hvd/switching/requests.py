"""Which mode the job should be in: who wishes it, and how all workers hear of it at the same step.

The chief's `GBACallback` decides from measurements; an operator (`gba-hvd switch`) speaks through the server of a host.
In allreduce mode wishes travel with the commit of a step, in an asynchronous mode they are told to the coordinator.
Carrying them out is the business of `handover`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from gba_hvd.callbacks import Event
from gba_hvd.mode_names import MODE_NUMBERS
from gba_hvd.modes.parameter_server import GbaMode
from gba_hvd.ps.messages import SwitchTo

if TYPE_CHECKING:
    from gba_hvd.training.engine import Engine

# A number for each mode (the chief wants it), for each mode again (an operator wants it), whether training is to wait
# for servers that are not up, and on how many hosts they are not.
_WAITS = 2 * len(MODE_NUMBERS)
_NOT_READY = _WAITS + 1
N_NUMBERS = _NOT_READY + 1
_RATES_EVERY_S = 2.0
_TELL_AGAIN_S = 2.0


class Wishes:
    """One worker's part. Belongs to the training thread.

    operator: what `gba-hvd switch` asked the server of this host for, (mode, reason), once
    waiting: what was agreed on and waits for servers that are not up
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.operator: Callable[[], tuple[str, str] | None] = lambda: None
        self.waiting: list[str] = []
        self._wished: tuple[str, str] | None = None
        self._followed, self._told_s = -1, 0.0  # step last looked at, when the coordinator was told
        self._rates_told_s = self._rounds_told_s = time.perf_counter()

    # --- allreduce mode ----------------------------------------------------------------------------------------------

    def tell(self, numbers: Tensor) -> None:
        """Before a commit: what this worker wishes, into its share of what is summed over the workers."""
        engine, switching = self._engine, self._engine.switching
        self._wished = None
        if switching is None or engine.mode is None:
            return
        switching.lr = max(engine.dense_lrs, default=0.0)
        if engine.world.rank == 0:
            self._wished = switching.wish(engine.step + 1, engine.mode.name)
            numbers[_WAITS] = float(switching.waits)
        numbers[_NOT_READY] = float(engine.line is not None and not engine.line.is_ready(to_enter=True))
        order = self.operator()
        if self._wished is not None:
            numbers[MODE_NUMBERS[self._wished[0]]] = 1.0
        if order is not None and order[0] == "auto":
            switching.pin("auto")
        elif order is not None:
            numbers[len(MODE_NUMBERS) + MODE_NUMBERS[order[0]]] = 1.0
            self._wished = order

    def hear(self, agreed: Sequence[float]) -> None:
        """After it: what all wish. An operator's word counts most.

        Where the servers of some host are not up, a mode waits for them, and allreduce goes on: the chief says its wish
        again with each commit.
        """
        engine, switching = self._engine, self._engine.switching
        self.waiting = []
        if switching is None or engine.mode is None:
            return
        for mode, code in MODE_NUMBERS.items():
            ordered = bool(agreed[len(MODE_NUMBERS) + code])
            if not ordered and not agreed[code]:
                continue
            own = self._wished is not None and self._wished[0] == mode
            reason = self._wished[1] if own and self._wished is not None else "the log of another worker has the reason"
            if ordered:
                switching.pin(mode)
            if mode == engine.mode.name:
                engine.switch_to = None
            elif agreed[_NOT_READY] and not agreed[_WAITS]:
                engine.switch_to, self.waiting = None, [f"mode {mode}"]
                switching.asked.obstacle = "the companion servers were not up"
            else:
                engine.switch_to = (mode, reason)

    # --- asynchronous modes ------------------------------------------------------------------------------------------

    def entered(self) -> None:
        """A mode has begun: nobody was told of a wish in it."""
        self._told_s = 0.0

    def follow(self, waited_s: float) -> None:
        """Before each micro-batch: tell the coordinator what an operator said here; on the chief, what would be better.

        waited_s: what the lease of the micro-batch was waited for.
        """
        engine, mode, switching = self._engine, self._engine.mode, self._engine.switching
        if not isinstance(mode, GbaMode) or switching is None:
            return
        self._tell_of_rounds(mode)
        if (order := self.operator()) is not None:  # given to the server of this host, which does not lead
            mode.client.send(0, SwitchTo(*order, pin=True))
        if engine.world.rank != 0:
            return
        if engine.step > self._followed:
            self._followed = engine.step
            self.tell_rates({str(rank): round(s, 5) for rank, s in mode.position.rates})
            if mode.name == "gba":
                seconds = [seconds for _, seconds in mode.position.rates]
                switching.measured_async(engine.step, seconds, engine.global_batch // engine.micro_batch, waited_s)
        if mode.position.wanted == "auto" and switching.mode != "auto":
            switching.pin("auto")
        wish = switching.wish(engine.step, mode.name)
        self._tell_if_late()
        now = time.perf_counter()
        if wish is not None and mode.position.wanted in ("", "auto") and now - self._told_s > _TELL_AGAIN_S:
            self._told_s = now  # it is heard with the next positions; until then it is not said again
            mode.client.send(0, SwitchTo(*wish))

    def _tell_if_late(self) -> None:
        """On the chief: a planned change of mode is wished for later than it was due."""
        engine, switching = self._engine, self._engine.switching
        if switching is None or switching.late is None:
            return
        (due, now), switching.late = switching.late, None
        text = (
            f"switch_at={due} is asked for at step {now}: only rank 0 asks, before each of its micro-batches, and the "
            "others went on while it computed one. For exact steps let a slow worker not be rank 0"
        )
        engine.emit(Event("switch_late", engine.step, text, {"due": due, "now": now}, level="warning"))

    # -----------------------------------------------------------------------------------------------------------------

    def _tell_of_rounds(self, mode: GbaMode) -> None:
        """Every few seconds: how a mode keeps its replicas together; the pace from the chief, failures from all."""
        now = time.perf_counter()
        if now - self._rounds_told_s < _RATES_EVERY_S:
            return
        self._rounds_told_s = now
        pace, dropped = mode.told()
        step = self._engine.step
        for why in dropped:
            text = f"a round of replicas was dropped, training goes on: {why}"
            self._engine.emit(Event("round_dropped", step, text, {"why": why}, level="warning"), only_here=True)
        told = {name: value for name, value in pace.items() if value is not None}  # no pace where no round ended well
        if in_vain := int(told.pop("waits_in_vain", 0)):
            often, limit_s = f"{in_vain} times" if in_vain > 1 else "once", self._engine.tables.config.lease_s
            text = f"training waited {often} for a round of replicas that did not end in {limit_s:.0f} s, and goes on"
            self._engine.emit(Event("round_late", step, text, {"times": in_vain}, level="warning"), only_here=True)
        if told and self._engine.world.rank == 0:
            text = f"no round of replicas ended well; dropped so far: {told.get('rounds_dropped', 0)}"
            if "rounds_per_s" in told:
                text = (
                    f"{told['rounds_per_s']:.1f} rounds/s, {told['steps_per_round']:.1f} local steps each, "
                    f"spread of the replicas {told['spread']:.2e}"
                )
            self._engine.emit(Event("rates", step, text, told))

    def tell_rates(self, seconds: dict[str, float]) -> None:
        """Every few seconds, from the chief: how long the workers take, and where micro-batches went."""
        engine, now = self._engine, time.perf_counter()
        if now - self._rates_told_s < _RATES_EVERY_S:
            return
        self._rates_told_s = now
        words = ", ".join(f"{rank}: {s:.3f} s" for rank, s in seconds.items())
        counts = {"dropped": engine.account.dropped, "lost": engine.account.lost, "refused": engine.refused}
        staleness = {str(k): n for k, n in sorted(engine.staleness.items())}
        data = {"seconds": seconds, **counts, "reissued": engine.reissued, "staleness": staleness}
        engine.emit(Event("rates", engine.step, f"seconds per micro-batch by worker: {words}", data))
