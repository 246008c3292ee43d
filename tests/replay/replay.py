"""The training of one chaos job, computed again from its trace, and compared with what the job ended with.

Checked on the way: every micro-batch of every epoch is a member of exactly one step; a push that counts is not staler
than the tolerance and one that is staler does not count; the values that a gradient was computed with are those of
steps between the one it says and the one it became a member of. Then the end, to 1e-5: dense values, rows. A row whose
gradient is what is left of larger ones that cancel may be off by what their rounding in float32 becomes (`Rows`).

Under rule look_ahead a gradient is computed with w(k) + 0.9 (w(k) - w(k-1)), w(k) the dense values after the last step
k that moved them, if k was applied since the mode was entered; otherwise with w(k). The optimizer steps w as without a
rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from .facts import Facts, Run, Step, Wrong, read
from .model import Clicks, Dense, Rows, first_rows, gradients, order, order_in_lanes, permutation, seed_of

TOLERANCE = 1e-5
STALE = 4  # steps, of the default threshold


class Replay:
    """values of every step so far stay: asynchronous gradients are of older ones.

    shown: by step, in which generation workers read which dense values after it; they are `history`'s in others
    """

    def __init__(self, facts: Facts, plan: dict[str, Any]) -> None:
        begin, self.plan = facts.begin, plan
        self.facts, self.data = facts, Clicks.of(plan["samples"], plan["features"])
        spec, row_spec = begin["optimizers"]["dense"], begin["optimizers"]["rows"]
        flat = np.concatenate([np.ravel(np.array(value, dtype=np.float64)) for value in begin["values"]])
        settings = {k: v["tuple"] if isinstance(v, dict) else v for k, v in spec["groups"][0].items()}
        self.dense = Dense(spec["class"].rpartition(":")[2], settings, flat)
        about, own = begin["tables"], begin["tables"].get("optimizers", {}).get("tables", {})
        specs = [row_spec, *begin["optimizers"].get("own_rows", [])]
        self.default_lr = row_spec["fields"]["lr"]
        of_table = {name: specs[own.get(name, 0)] for name in about["tables"]}
        self.own_lrs = {name: specs[number]["fields"]["lr"] for name, number in own.items()}
        self.tables = {
            name: Rows(
                of_table[name]["class"].rpartition(":")[2],
                of_table[name]["fields"],
                # Stored as float32: the very first values are not computed to more.
                first_rows(rows, dim, about["seed"], name, about["init_std"]).astype(np.float32).astype(np.float64),
            )
            for name, (rows, dim) in about["tables"].items()
        }
        self.orders: dict[Run, np.ndarray] = {}
        self.history: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self.shown: dict[int, tuple[int, np.ndarray]] = {}
        self._remember()

    def order(self, run: Run) -> np.ndarray:
        """The samples of a run, one after the other; of streams by what is in their files and shards."""
        line, begin, n, kind = self.facts.orders[run], self.facts.begin, self.plan["samples"], self.plan["data"]
        seed, epoch = line["seed"], line["epoch"]
        cut = begin["micro_batch"], begin["global_batch"] // begin["micro_batch"]
        if kind == "log":
            return order(n, seed, epoch)
        if kind == "parquet":
            files = [len(part) for part in np.array_split(np.arange(n), 3)]
            sizes = [min(50, size - at) for size in files for at in range(0, size, 50)]
            groups = permutation(len(sizes), seed_of(seed, f"row groups of epoch {epoch}"))
            return order_in_lanes(sizes, groups, seed, epoch, *cut, window=-(-8 // cut[1]))
        ends = [0, *sorted((number * 7919) % n for number in range(1, 19)), n, n]
        shards = permutation(20, seed_of(seed, f"shards of epoch {epoch}"))[8 * run[1] :][:8]
        rows = np.concatenate([np.arange(ends[shard], ends[shard + 1]) for shard in shards])
        sizes = [ends[shard + 1] - ends[shard] for shard in shards]
        return rows[order_in_lanes(sizes, np.arange(len(sizes)), seed, epoch, *cut, window=1)]

    def run(self) -> None:
        self._check_members()
        for step in self.facts.steps:
            self._step(step)
            self._remember()
            if step.generation is not None and step.ahead:
                self.shown[step.number] = step.generation, self._ahead(step)

    def _remember(self) -> None:
        self.history.append((self.dense.values, {name: rows.values for name, rows in self.tables.items()}))

    def _ahead(self, step: Step) -> np.ndarray:
        """What workers read after a step of look_ahead. One whose pushes were all dropped changes nothing."""
        if not any(weight > 0 for _, _, weight, _ in step.members):
            generation, shown = self.shown.get(step.number - 1, (None, self.dense.values))
            return shown if generation == step.generation else self.dense.values
        before, now = self.history[step.number - 1][0], self.history[step.number][0]
        ahead: np.ndarray = now + step.ahead * (now - before)
        return ahead

    def _check_members(self) -> None:
        begin = self.facts.begin
        counted = Counter((run, micro) for step in self.facts.steps for run, micro, *_ in step.members)
        twice = [member for member, n in counted.items() if n > 1]
        if twice:
            raise Wrong(f"micro-batches {twice[:5]} (epoch and segment, index) are members of more than one step")
        last = max(epoch for (epoch, _), _ in counted)
        runs = [run for run in self.facts.orders if run[0] <= last]
        for epoch in range(last + 1):
            n = sum(self.facts.orders[run]["n_samples"] for run in runs if run[0] == epoch)
            if n != self.plan["samples"]:
                raise Wrong(f"epoch {epoch}: its segments have {n} samples, of {self.plan['samples']}")
        for run in runs:
            n_micro = -(-self.facts.orders[run]["n_samples"] // begin["micro_batch"])
            if missing := [micro for micro in range(n_micro) if (run, micro) not in counted]:
                raise Wrong(f"epoch and segment {run}: micro-batches {missing[:5]} are members of no step")

    def _step(self, step: Step) -> None:
        begin, size = self.facts.begin, self.facts.begin["micro_batch"]
        samples_of = {m: min(size, self.facts.orders[run]["n_samples"] - m * size) for run, m, *_ in step.members}
        if abs(step.scale - size / sum(samples_of.values())) > 1e-6:
            raise Wrong(f"step {step.number}: scale {step.scale}, its samples are {sum(samples_of.values())}")
        dense = np.zeros_like(self.dense.values)
        rows: dict[str, dict[int, Any]] = {name: {} for name in self.tables}
        summed: dict[str, dict[int, float]] = {name: defaultdict(float) for name in self.tables}
        contained: dict[str, Counter[int]] = {name: Counter() for name in self.tables}
        row_average = begin["row_average"]
        for run, micro, weight, push in step.members:
            self._check_weight(step, weight, samples_of[micro] / size, push)
            if run not in self.orders:
                self.orders[run] = self.order(run)
            samples = self.orders[run][micro * size : micro * size + samples_of[micro]]
            user, items = self.data.user[samples], self.data.items[samples]
            if weight or row_average == "contributors":
                for name, ids in (("user", user), ("item", items)):
                    contained[name].update(set(ids.ravel().tolist()))
            if weight == 0:
                continue
            values, tables = self.history[step.number - 1] if push is None else self._values_of(step, push)
            by_w, by_b, by_user, by_items = gradients(
                self.data, samples, tables["user"][user], tables["item"][items], values[None, :-1], values[-1:]
            )
            dense += weight * np.concatenate([by_w.ravel(), by_b])
            for name, ids, grads in (("user", user, by_user), ("item", items, by_items)):
                for row, grad in zip(ids.ravel().tolist(), grads.reshape(ids.size, -1), strict=True):
                    rows[name][row] = rows[name].get(row, 0.0) + weight * grad
                    summed[name][row] += weight * float(np.abs(grad).max())
        if any(weight > 0 for _, _, weight, _ in step.members):  # else the optimizers do not step at all
            self.dense.step(step.scale * dense, step.lrs[0])
        for name, found in rows.items():
            if found:
                touched = np.array(sorted(found))
                grad = step.scale * np.array([found[row] for row in touched.tolist()])
                size = step.scale * np.array([summed[name][row] for row in touched.tolist()])
                if row_average != "global":
                    count = np.array([contained[name][row] for row in touched.tolist()])
                    grad *= len(step.members) / count[:, None]
                    size *= len(step.members) / count
                lr = step.row_lr
                if name in self.own_lrs:
                    lr *= self.own_lrs[name] / self.default_lr
                self.tables[name].step(touched, grad, lr, step.number, size)

    def _check_weight(self, step: Step, weight: float, full: float, push: dict[str, Any] | None) -> None:
        stale = 0 if push is None else max(0, step.number - 1 - push["token"])
        expected = full if stale <= STALE else 0.0
        if abs(weight - expected) > 1e-6:
            raise Wrong(f"step {step.number}: a push {stale} steps stale counts {weight}, expected {expected}")

    def _values_of(self, step: Step, push: dict[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """What a pushed gradient was computed with; rows as they were read, once that is found to be possible."""
        at = max(push["dense_steps"])
        if not 0 <= at < step.number:
            raise Wrong(f"step {step.number}: a gradient was computed with dense values of step {at}")
        tables = {}
        for name, read_ in push["tables"].items():
            table, ids = self.history[at][1][name].copy(), np.array(read_["rows"])
            found = np.array(read_["values"])
            off = np.min([np.abs(self.history[k][1][name][ids] - found) for k in range(at, step.number)], axis=0)
            off -= self.tables[name].rounding[ids][:, None]
            if off.max() > TOLERANCE:
                row = ids[np.unravel_index(off.argmax(), off.shape)[0]]
                raise Wrong(
                    f"step {step.number}: micro-batch {push['micro']} read row {row} of {name!r}, {off.max():.2e} from "
                    f"its value at any step from {at} to {step.number - 1}"
                )
            table[ids] = found
            tables[name] = table
        generation, shown = self.shown.get(at, (None, self.history[at][0]))
        return shown if generation == push["generation"] else self.history[at][0], tables


def compare(replay: Replay, arrays: dict[str, np.ndarray]) -> float:
    """The largest difference from what the job ended with, but for rounding. Raises Wrong above the tolerance."""
    own = {"dense": replay.dense.values, **{name: rows.values for name, rows in replay.tables.items()}}
    worst = 0.0
    for name, values in own.items():
        off = np.abs(arrays[name].astype(np.float64) - values) / np.maximum(1.0, np.abs(values))
        if name in replay.tables:
            off = np.maximum(0.0, off - replay.tables[name].rounding[:, None])
        worst = max(worst, float(off.max()))
        if not off.max() <= TOLERANCE:
            place = np.unravel_index(off.argmax(), off.shape)
            raise Wrong(f"{name}{list(map(int, place))}: the job has {arrays[name][place]}, the replay {values[place]}")
    return worst


def replay(trace: Path, result: Path, plan: dict[str, Any]) -> tuple[int, float]:
    """(steps, largest difference). plan: of a chaos job: samples, data, features. Raises NotReplayable, Wrong."""
    computed = Replay(read(trace), plan)
    computed.run()
    with np.load(result) as stored:
        return len(computed.facts.steps), compare(computed, dict(stored))
