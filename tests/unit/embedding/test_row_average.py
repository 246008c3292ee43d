"""What a row's gradient is divided by: computed by hand for a server's part, for allreduce, and beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.simulated.experiment import Experiment

from gba_hvd import SGD, BadInput
from gba_hvd.embedding.row_gradients import ROW_AVERAGES, RowGrad, merge_contributors, pack_by_owner, with_contributors
from gba_hvd.epoch import EpochOrder
from gba_hvd.ps.coordinator.discipline import Discipline
from gba_hvd.ps.coordinator.ledger import Member, StepPlan
from gba_hvd.ps.coordinator.staleness import weighting
from gba_hvd.ps.coordinator.weighed_step import weighed
from gba_hvd.ps.messages import Apply, Endpoint, Enter, JobPosition, ProtocolError
from gba_hvd.ps.partition.partition import Partition, gather
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from gba_hvd.torch_optimizers import spec_of
from recovery import state_codec

DIM, B, ROW_LR = 4, 8, 0.5
# micro-batch: its staleness, its samples, and the gradient (the same number in each element) of each row it contains
PUSHES: dict[int, tuple[int, int, dict[int, float]]] = {
    0: (0, B, {0: 1.0, 1: 2.0}),
    1: (2, B, {0: 3.0, 2: 5.0}),
    2: (4, B, {0: 7.0, 3: 11.0}),
    3: (5, B, {0: 13.0, 2: 17.0, 4: 19.0}),  # one more than the tolerance: threshold and linear drop it
    4: (0, 2, {1: 23.0, 5: 29.0}),  # the short one at the end of an epoch
}
F = {  # f(staleness) as docs/MODES.md has it, tolerance 4
    "threshold": lambda s: float(s <= 4),
    "linear": lambda s: max(0.0, 1 - s / 5),
    "inverse": lambda s: 1 / (1 + s),
    "gap_aware": lambda s: 1.0,
}


def by_hand(staleness: str, row_average: str) -> dict[int, float]:
    """Row -> gradient of the step; a row that is touched by dropped gradients only has none."""
    f = {micro: F[staleness](s) for micro, (s, _, _) in PUSHES.items()}
    samples = sum(n for _, n, _ in PUSHES.values())
    found = {}
    for row in range(6):
        inside = [micro for micro, (_, _, rows) in PUSHES.items() if row in rows]
        kept = [micro for micro in inside if f[micro] > 0]
        if kept:
            mean = sum(f[m] * PUSHES[m][1] * PUSHES[m][2][row] for m in kept) / samples  # of the global batch
            count = {"global": len(PUSHES), "contributors": len(inside), "kept_contributors": len(kept)}[row_average]
            found[row] = mean * len(PUSHES) / count
    return found


class Servers:
    """Parts of one model on n servers; shard s is at server s mod n. The dense part is one tensor, at server 0."""

    def __init__(self, folder: Path, n: int, row_average: str, rule: str) -> None:
        optimizer = SGD(lr=ROW_LR)
        layout = Layout.of({"user": (12, DIM)}, optimizer.slots, 3, seed=3, init_std=0.1)
        self.owner = [shard % n for shard in range(3)]
        self.memory = ShardMemory.create_or_open(folder, "rows", layout, grace_s=0)
        self.memory.reserve([0, 1, 2])
        for shard in range(3):
            self.memory.init_shard(shard, 0)
        self.parts = []
        for me in range(n):
            sizes = [(f"w{me}", [2], 0)] if me == 0 else []
            spec = spec_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1))
            servers = [Endpoint(0, i, "127.0.0.1", 1, 2) for i in range(n)]
            enter = Enter(
                1, servers, me, self.owner, JobPosition(), 64, 5 * B, B, {"name": "gba"}, row_average, ROW_LR, [0.1],
                sizes, spec, rule=rule,
            )  # fmt: skip
            frames = [
                bytearray(np.zeros(2 * len(sizes), np.float32).tobytes()),
                state_codec.encode([{} for _ in sizes]),
            ]
            self.parts.append(Partition.begin(enter, frames, folder / f"dense{me}", self.memory, optimizer, 1 << 32))
        self.row_average = row_average

    def rows(self) -> np.ndarray:
        """float32 [12]: the first element of each row."""
        keys = np.arange(12)
        found = gather(self.memory, np.ones(3, bool), [bytearray(keys.astype(np.int64).tobytes())])[0]
        return found[:, 0].copy()

    def push(self, micro: int, serial: int, rows: dict[int, float]) -> None:
        keys = np.array(list(rows), np.int64)
        grad = RowGrad(keys, np.repeat(np.array(list(rows.values()), np.float32)[:, None], DIM, 1))
        grad = grad if self.row_average == "global" else with_contributors(grad)
        message, words = pack_by_owner([grad], np.array(self.owner, np.int32), len(self.parts))
        for part, own in zip(self.parts, np.split(message, np.cumsum(words)[:-1]), strict=True):
            dense = np.zeros(part.n_dense, np.float32)
            assert part.push(micro, serial, [bytearray(dense.tobytes()), bytearray(own.tobytes())], -1)

    def step(self, number: int, members: Sequence[Member]) -> None:
        plan = StepPlan(number, tuple(members), sum(m.n_samples for m in members))
        sums = weighed(plan, B, Discipline(), self.row_average)
        for part in self.parts:
            request = Apply(
                1, number, sums.members, sums.scale, ROW_LR, [0.1], 99, dropped=sums.dropped, n_micro=sums.n_micro
            )
            applied = part.apply(request)
            assert (applied.failed, applied.missing, applied.missed) == ("", [], 0)
            assert len(part.buffer) == 0

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self.memory.close()


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Servers]]:
    made: list[Servers] = []

    def make(n: int, row_average: str, rule: str = "none") -> Servers:
        made.append(Servers(tmp_path, n, row_average, rule))
        return made[-1]

    yield make
    for some in made:
        some.close()


@pytest.mark.parametrize("row_average", ROW_AVERAGES)
@pytest.mark.parametrize("staleness", F)
@pytest.mark.parametrize("n_servers", [1, 2])
def test_servers_divide_as_computed_by_hand(
    servers: Callable[..., Servers], n_servers: int, staleness: str, row_average: str
) -> None:
    some = servers(n_servers, row_average)
    before, weights = some.rows(), weighting(staleness)
    members = []
    for micro, (stale, n, rows) in PUSHES.items():
        some.push(micro, 10 + micro, rows)
        members.append(Member(micro, 10 + micro, weights.weight(stale), n, stale))
    some.step(1, members)
    expected = by_hand(staleness, row_average)
    moved = some.rows() - before
    for row in range(12):
        assert moved[row] == pytest.approx(-ROW_LR * expected.get(row, 0.0), rel=1e-5, abs=1e-6), row


def test_a_row_of_one_decayed_gradient_is_decayed(servers: Callable[..., Servers]) -> None:
    """The weight is not divided out again."""
    some = servers(1, "contributors")
    before = some.rows()
    some.push(0, 1, {0: 1.0})
    some.push(1, 2, {1: 1.0})
    some.step(1, [Member(0, 1, 0.25, B, 3), Member(1, 2, 1.0, B, 0)])
    np.testing.assert_allclose((some.rows() - before)[:2], [-ROW_LR * 0.25, -ROW_LR], rtol=1e-5)


def test_a_gradient_that_was_refused_is_in_no_buffer(servers: Callable[..., Servers]) -> None:
    some = servers(1, "contributors")
    before = some.rows()
    some.push(0, 1, {0: 1.0})
    some.step(1, [Member(0, 1, 1.0, B, 0), Member(1, 2, 0.0, B, 0, refused=True)])
    # The global batch's mean has half of it; among two micro-batches, one contains the row.
    assert (some.rows() - before)[0] == pytest.approx(-ROW_LR * 1.0)


def test_a_decision_without_its_number_of_micro_batches_is_refused(servers: Callable[..., Servers]) -> None:
    with pytest.raises(ProtocolError, match="1 gradients of 0 micro-batches"):
        servers(1, "contributors").parts[0].apply(Apply(1, 1, [], 1.0, ROW_LR, [0.1], 0, dropped=[(0, 1)]))


def test_a_round_of_hop_bw_is_what_it_waited_for() -> None:
    plan = StepPlan(1, (Member(0, 1, 1.0, B, 0), Member(1, 2, 0.0, B, 1)), 2 * B)
    sums = weighed(plan, B, Discipline("hop_bw"), "contributors")
    assert (sums.scale, sums.n_micro, sums.dropped) == (1.0, 1, [])


def test_counts_are_not_weighted_and_dropped_rows_are_not_touched() -> None:
    def grad(*keys: int) -> RowGrad:
        return with_contributors(RowGrad(np.array(keys, np.int64), np.ones((len(keys), 2), np.float32)))

    merged = merge_contributors([(grad(3, 1), 0.5), (grad(1), 1.0)], [grad(1, 9), grad(9)])
    assert merged.keys.tolist() == [3, 1]
    np.testing.assert_array_equal(merged.values, [[0.5, 0.5, 1.0], [1.5, 1.5, 3.0]])


# --- allreduce -------------------------------------------------------------------------------------------------------


def rows_after_an_epoch(clicker: Any, job: Any, data: Any, row_average: str) -> dict[str, np.ndarray]:
    """SGD at 0.5 on rows and dense parameters, as in `conftest.Training`: plain torch, micro-batch by micro-batch."""
    weights = {name: torch.from_numpy(values.copy()).requires_grad_() for name, values in job.all_rows().items()}
    model = clicker(lambda ids: {name: weights[name][column] for name, column in ids.items()})
    order = EpochOrder(len(data), 0, 0).rows(0, len(data))
    for first in range(0, len(data), 16):
        batch = order[first : first + 16]
        micros = [batch[at : at + 4] for at in range(0, len(batch), 4)]
        total = {name: np.zeros_like(values.detach().numpy()) for name, values in weights.items()}
        inside: dict[str, Counter[int]] = {name: Counter() for name in weights}
        dense = [torch.zeros_like(p) for p in model.parameters()]
        for micro in micros:
            taken = data.take(micro)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(model(taken), taken.label)
            loss.backward()
            for name, values in weights.items():
                assert values.grad is not None
                total[name] += values.grad.numpy() * len(micro) / len(batch)
                values.grad = None
                inside[name].update(set(taken.ids[name].tolist()))
            for found, p in zip(dense, model.parameters(), strict=True):
                found.add_(p.grad, alpha=len(micro) / len(batch))
                p.grad = None
        with torch.no_grad():
            for name, values in weights.items():
                for row, count in inside[name].items():
                    factor = 1.0 if row_average == "global" else len(micros) / count
                    values[row] -= 0.5 * factor * torch.from_numpy(total[name][row])
            for sum_, p in zip(dense, model.parameters(), strict=True):
                p.sub_(0.5 * sum_)
    return {name: values.detach().numpy() for name, values in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ROW_AVERAGES)
@pytest.mark.parametrize("hosts", ["a", "aab"])
def test_allreduce_divides_as_computed_by_hand(
    workers: Any, on_host: Any, clicks: Any, clicker: Any, hosts: str, row_average: str
) -> None:
    jobs = [on_host(host, rows=SGD(lr=0.5), row_average=row_average) for host in hosts]
    start = on_host("start", rows=SGD(lr=0.5))
    workers.together([start], lambda job: job.state.ensure_synced())
    expected = rows_after_an_epoch(
        clicker, start, clicks(54), row_average
    )  # the last step has micro-batches of 4 and 2

    def train(job: Any) -> None:
        job.epoch(clicks(54))

    workers.together(jobs, train)
    for job in jobs:
        ready = job.tables.memory.marks().ready
        for name, rows in job.all_rows().items():
            here = ready[np.arange(len(rows)) % len(ready)] == 1
            np.testing.assert_allclose(rows[here], expected[name][here], rtol=1e-4, atol=1e-5, err_msg=name)


def test_a_row_in_two_forward_passes_of_a_micro_batch_has_one_contributor(training: Any, clicks: Any) -> None:
    once, twice = training(row_average="contributors"), training(row_average="contributors")

    def apart(ids: Any) -> Any:
        first = {"user": ids["user"], "item": ids["item"][: len(ids["item"]) // 2]}
        found, more = twice.tables(first), twice.tables({"item": ids["item"][len(ids["item"]) // 2 :]})
        return {**found, "item": torch.cat([found["item"], more["item"]])}

    del twice.model.embed
    twice.model.embed = apart
    for job in (once, twice):
        job.epoch(clicks(50))
    for name, rows in once.all_rows().items():
        np.testing.assert_allclose(twice.all_rows()[name], rows, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_name_that_is_not_known_is_refused(training: Any) -> None:
    with pytest.raises(BadInput, match="row_average 'contributor' is not known: did you mean 'contributors'"):
        training(row_average="contributor")


def test_a_simulated_task_without_tables_refuses_it() -> None:
    with pytest.raises(BadInput, match="'quadratic' has no tables, use 'clicks'"):
        Experiment(row_average="contributors")
