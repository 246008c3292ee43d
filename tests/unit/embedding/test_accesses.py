"""How often a row was looked up travels with its gradient, and is counted where the gradient is applied."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gba_hvd
from gba_hvd import Compression
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints
from gba_hvd.embedding.accesses import count_accesses
from gba_hvd.embedding.row_gradients import (
    RowGrad,
    merge,
    pack_by_owner,
    unpack,
    with_access_column,
    without_access_column,
)
from gba_hvd.errors import ShardMemoryError
from gba_hvd.ps import validation
from gba_hvd.ps.messages import Endpoint, ProtocolError
from gba_hvd.ps.worker.session import PsSession
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.layout import Layout, SampledSpec
from gba_hvd.shm.shard_memory import ShardMemory
from recovery import CheckpointCallback
from tests.unit.thread_world import Workers


def counted(job: Any) -> dict[str, np.ndarray]:
    """Accesses of the rows whose shards are in this job's memory; 0 for all others. uint32 [n] by table."""
    rows, found = ShardRows(job.tables.memory), {}
    for number, table in enumerate(rows.schema.tables):
        found[table.name] = np.zeros(table.n_rows, np.uint32)
        for shard in rows.shards():
            found[table.name][shard :: rows.schema.n_shards] = rows.slab(number, shard).counts
    return found


def looked_up(clicks: Any, epochs: int) -> dict[str, np.ndarray]:
    return {
        "user": epochs * np.bincount(clicks.user, minlength=20),
        "item": epochs * np.bincount(clicks.item, minlength=7),
    }


@pytest.mark.slow
@pytest.mark.parametrize("row_average", ["global", "contributors"])
def test_every_lookup_counts_whatever_the_weights_of_its_micro_batch(
    training: Any, clicks: Any, row_average: str
) -> None:
    job = training(row_average=row_average)
    job.tables.counts_accesses = True
    for _ in range(2):
        job.epoch(clicks(50))  # the last step is short
    for name, expected in looked_up(clicks(50), 2).items():
        assert np.array_equal(counted(job)[name], expected)


def test_without_a_policy_that_asks_for_it_a_step_counts_once(training: Any, clicks: Any) -> None:
    job = training(global_batch=50, micro_batch=50)
    job.epoch(clicks(50))
    assert counted(job)["item"].tolist() == [1] * 7


def test_each_id_of_a_bag_is_an_access(training: Any) -> None:
    class Bags:
        def __len__(self) -> int:
            return 8

        def take(self, rows: np.ndarray) -> gba_hvd.Batch:
            ids: dict[str, Tensor | gba_hvd.Bag] = {
                "user": torch.from_numpy(rows % 20),
                "item": gba_hvd.Bag(torch.tensor([6, 6, 1] * len(rows)), torch.arange(0, 3 * len(rows), 3)),
            }
            return gba_hvd.Batch(ids, torch.zeros(len(rows), 2), torch.ones(len(rows)))

    job = training()
    job.tables.counts_accesses = True
    job.epoch(Bags())
    assert counted(job)["item"].tolist() == [0, 8, 0, 0, 0, 0, 16]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", ["aa", "ab", "aba"])
@pytest.mark.parametrize("spec", [Compression.none, Compression.topk(0.5).always()], ids=str)
@pytest.mark.parametrize("row_average", ["global", "contributors"])
def test_accesses_reach_the_host_that_holds_the_row(
    workers: Workers, on_host: Any, clicks: Any, hosts: str, spec: Any, row_average: str
) -> None:
    jobs = [on_host(host, row_compression=spec, row_average=row_average) for host in hosts]
    for job in jobs:
        job.tables.counts_accesses = True
    workers.together(jobs, lambda job: job.epoch(clicks(50)))
    by_host = {host: counted(job) for host, job in zip(hosts, jobs, strict=True)}
    for name, expected in looked_up(clicks(50), 1).items():
        assert np.array_equal(sum(found[name] for found in by_host.values()), expected)


def a_grad(keys: list[int], accesses: list[int], dim: int = 3) -> RowGrad:
    values = np.ones((len(keys), dim), np.float32)
    return RowGrad(np.array(keys, np.int64), values, np.array(accesses, np.uint32))


def test_merging_adds_accesses_up_without_weights() -> None:
    merged = merge([(a_grad([4, 1], [2, 5]), 0.25), (a_grad([1], [7]), 0.5)])
    assert merged.accesses is not None
    assert dict(zip(merged.keys.tolist(), merged.accesses.tolist(), strict=True)) == {4: 2, 1: 12}


def test_a_message_and_a_compressors_column_carry_them_exactly() -> None:
    grads = [a_grad([5, 0, 2], [1, 1 << 24, 3]), RowGrad.none(2, counted=True)]
    message, words = pack_by_owner(grads, np.array([0, 1], np.int32), 2)
    to_0, to_1 = (unpack(part, [3, 2], counted=True) for part in np.split(message, np.cumsum(words)[:-1]))
    assert (to_0[0].accesses.tolist(), to_1[0].accesses.tolist()) == ([1 << 24, 3], [1])  # type: ignore[union-attr]
    assert len(to_1[1].keys) == 0
    there_and_back = without_access_column(with_access_column(grads[0]))
    assert there_and_back.accesses.tolist() == [1, 1 << 24, 3]  # type: ignore[union-attr]
    assert np.array_equal(there_and_back.values, grads[0].values)


def test_a_push_of_a_row_that_nobody_looked_up_is_refused() -> None:
    layout = Layout.of({"user": (20, 3)}, (), n_shards=2, seed=1, init_std=0.1)
    mine, to_me = np.ones(2, bool), np.zeros(2, np.int32)
    good = pack_by_owner([a_grad([5, 0], [1, 2])], to_me, 1)[0]
    validation.check_row_message(layout, good, mine, 0, counted=True)
    with pytest.raises(ProtocolError, match="was not looked up"):
        validation.check_row_message(layout, pack_by_owner([a_grad([5], [0])], to_me, 1)[0], mine, 0, counted=True)
    with pytest.raises(ProtocolError, match="words too many"):
        validation.check_row_message(layout, good, mine, 0)


# --- SSU: lists of sampled accesses in shard memory ------------------------------------------------------------------

TABLES = {"user": (50, 3), "tiny": (4, 3), "wide": (30, 5), "item": (41, 3)}
CAPACITIES = (5, 0, 30, 6)


def memory_with_lists(tmp_path: Path, capacities: tuple[int, ...] = CAPACITIES, period: int = 1) -> ShardMemory:
    layout = replace(Layout.of(TABLES, (), n_shards=2, seed=1, init_std=0.1), sampled=SampledSpec(capacities, period))
    memory = ShardMemory.create_or_open(tmp_path, "job", layout, grace_s=0)
    for shard in range(2):
        memory.init_shard(shard, 0)
    return memory


def access(memory: ShardMemory, rows: dict[str, list[int]], step: int, shuffled: bool = False) -> None:
    """One step, a row that is named n times had n accesses."""
    layout = memory.layout
    memory.begin(np.arange(2), step)
    for number, group in enumerate(layout.groups):
        keys = [layout.place_of_table[name][1] + row for name, ids in rows.items() for row in ids
                if layout.place_of_table[name][0] == number]  # fmt: skip
        distinct, accesses = np.unique(np.array(keys, np.int64), return_counts=True)
        values = np.ones((len(distinct), group.dim), np.float32)
        grad = RowGrad(distinct, values, accesses.astype(np.uint32))
        order = np.random.default_rng(step).permutation(len(distinct)) if shuffled else np.arange(len(distinct))
        count_accesses(memory, group, grad.select(order), step)
    memory.finish(np.arange(2), step)


def take(memory: ShardMemory) -> dict[str, list[int]]:
    """Rows that a save would take, by table."""
    rows, found = ShardRows(memory), {}
    assert memory.layout.sampled is not None
    lists = rows.sampled_accesses(memory.layout.sampled.capacities, memory.layout.sampled.period)
    for (number, shard), listed in lists.items():
        taken = listed.take(lambda shard=shard: rows.step_marks(shard))
        found.setdefault(rows.schema.tables[number].name, []).extend((2 * taken + shard).tolist())
    return {name: sorted(ids) for name, ids in found.items()}


def test_rows_of_all_tables_and_shards_are_listed_until_they_are_taken(tmp_path: Path) -> None:
    memory = memory_with_lists(tmp_path)
    values = memory.flat.copy()
    access(memory, {"user": [0, 7, 49], "tiny": [1], "item": [40], "wide": [3, 3]}, 1)
    access(memory, {"user": [7, 8]}, 2)
    assert take(memory) == {"user": [0, 7, 8, 49], "item": [40], "wide": [3]}
    assert take(memory) == {"user": [], "item": [], "wide": []}
    access(memory, {"user": [7]}, 3)
    assert take(memory)["user"] == [7]
    assert np.array_equal(weights_of(memory.flat, memory), weights_of(values, memory))
    memory.close()


def weights_of(flat: np.ndarray, memory: ShardMemory) -> np.ndarray:
    """Of all rows; counters and lists left out."""
    layout, found = memory.layout, []
    for shard in range(layout.n_shards):
        for group in layout.groups:
            start = shard * layout.region_words + group.at
            records = flat[start : start + group.rows_per_shard * group.record].reshape(
                group.rows_per_shard, group.record
            )
            found.append(records[:, :-1].ravel())
    return np.concatenate(found)


def test_a_full_list_stays_bounded_and_distinct_and_every_row_has_its_chance(tmp_path: Path) -> None:
    memory, seen = memory_with_lists(tmp_path), set()
    for step in range(1, 60):
        access(memory, {"user": list(range(50))}, step, shuffled=True)
        if step % 3 == 0:
            taken = take(memory)["user"]
            assert len(taken) == len(set(taken)) == 10  # 5 of each shard
            seen |= set(taken)
    assert seen == set(range(50))
    memory.close()


def test_every_second_access_is_looked_at_with_another_phase_in_each_step(tmp_path: Path) -> None:
    memory = memory_with_lists(tmp_path, (25, 0, 15, 21), period=2)
    found = []
    for step in range(1, 40):
        access(memory, {"user": list(range(10))}, step)
        found.append(tuple(take(memory)["user"]))
    assert set(found) == {(0, 2, 4, 6, 8), (1, 3, 5, 7, 9)}
    access(memory, {"user": [3, 3]}, 40)  # two accesses: one of them is looked at, whatever the phase
    assert take(memory)["user"] == [3]
    memory.close()


def test_lists_in_shard_memory_are_as_those_of_the_plain_class(tmp_path: Path) -> None:
    """Written by the kernel, goes on to be written by the class, and the other way round."""
    memory = memory_with_lists(tmp_path, (25, 0, 15, 21))
    access(memory, {"user": [0, 2, 4]}, 1)
    plain = ShardRows(memory).sampled_accesses((25, 0, 15, 21), 1)[0, 0]
    assert len(plain) == 3
    plain.add(np.array([2, 9]), np.random.default_rng(0))
    access(memory, {"user": [18, 20]}, 2)
    assert plain.take().tolist() == [0, 1, 2, 9, 10]
    memory.close()


def test_a_memory_without_these_lists_says_what_to_do(tmp_path: Path) -> None:
    memory = memory_with_lists(tmp_path)
    with pytest.raises(ShardMemoryError, match="before the first sync"):
        ShardRows(memory).sampled_accesses((1, 0, 1, 1), 2)
    memory.close()


def test_a_layout_with_lists_is_described_and_read_back(tmp_path: Path) -> None:
    layout = replace(Layout.of(TABLES, (), n_shards=2, seed=1, init_std=0.1), sampled=SampledSpec(CAPACITIES, 2))
    again = Layout.of_description(json.loads(json.dumps(layout.describe())))
    assert (again, again.region_words) == (layout, layout.region_words)
    assert "sampled" not in replace(layout, sampled=None).describe()


def test_a_job_lists_what_it_accesses(training: Any, clicks: Any) -> None:
    job = training(n_shards=2)
    job.tables.counts_accesses = True
    job.tables.layout = replace(job.tables.layout, sampled=SampledSpec((3, 0), 2))
    job.epoch(clicks(50))
    taken = take(job.tables.memory)["user"]
    assert len(taken) == len(set(taken)) == 6
    assert set(taken) <= set(clicks(50).user.tolist())


def test_a_callback_that_comes_when_servers_do_not_count_is_refused(training: Any, tmp_path: Path) -> None:
    """A push would have accesses that the mode's servers know nothing of."""
    job, places = training(), (Endpoint(0, 0, "", 0, 0),)
    session = PsSession(1, "gba", "job", b"", places, (0,), (0,), "global")
    servers = SimpleNamespace(name="gba", session=session)
    job.state.engine.mode = SimpleNamespace(servers=servers)
    with pytest.raises(gba_hvd.BadInput, match=r"policy 'mfu' counts .* servers of mode 'gba' .*use policy='delta'"):
        JobCheckpoints(job.state.engine, CheckpointCallback(str(tmp_path / "saved"), policy="mfu"))
    job.state.engine.mode = None
    assert not job.tables.counts_accesses


@pytest.mark.parametrize("policy", [None, "delta", "ssu"])
def test_a_callback_that_comes_after_the_memory_is_refused(
    training: Any, clicks: Any, tmp_path: Path, policy: str | None
) -> None:
    job = training()
    job.epoch(clicks(50))
    with pytest.raises(gba_hvd.BadInput, match="register the CheckpointCallback before"):
        job.state.register_callbacks([CheckpointCallback(str(tmp_path / "store"), policy=policy)])
    job.epoch(clicks(50))
