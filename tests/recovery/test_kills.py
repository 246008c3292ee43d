"""Whatever kills a saving process, and whatever happens to its bytes: the newest whole checkpoint comes back, or none.

RECOVERY_TEST_KILLS and RECOVERY_TEST_FLIPS say how many kills at random instants and flipped bits there are (200 and
10,000 for a long run).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from recovery.catalog.retention import objects_of
from recovery.checkpointer import Checkpointer
from recovery.config import Config
from recovery.errors import Damaged
from recovery.format.manifest import Manifest
from recovery.restore import restore
from recovery.storage.open import open_store
from recovery.storage.store import Store
from recovery.testing import RamStore, Saver, train, two_tables, values
from recovery.torch_rows.tensor_rows import TensorRows
from tests.recovery.holders import assert_same

KILLS = int(os.environ.get("RECOVERY_TEST_KILLS", "12"))
FLIPS = int(os.environ.get("RECOVERY_TEST_FLIPS", "300"))
POLICIES = ("full", "delta", "mfu")
CONFIG = Config(job="killed", section_bytes=8 << 10, blob_bytes=64 << 10, level=0, keep_last=10, lease_s=600)
BY_POLICY = {
    policy: replace(CONFIG, policy=policy, row_fraction=0.01 if policy == "mfu" else CONFIG.row_fraction)
    for policy in POLICIES
}
SAVES = 3
SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["tests.recovery.test_kills"])

Values = dict[str, np.ndarray]


def make() -> TensorRows:
    return two_tables(2, n_rows=3000)


def empty() -> TensorRows:
    return two_tables(2, n_rows=3000, seed=None)


def work(store: Store, policy: str, saves: int) -> None:
    """Resume, then train and save."""
    rows = make()
    with Checkpointer(store, rows, BY_POLICY[policy]) as checkpoints:
        report = checkpoints.restore()
        if report is not None:
            rows.continue_from(report.step)
        for _ in range(saves):
            train(rows, 1, seed=1)
            checkpoints.save(rows.last_step, 0, b"step %d" % rows.last_step).result(60)


# --- killed before, within and after each write -----------------------------------------------------------------------


class DeadlyStore:
    """A local store whose process dies at its n-th put."""

    def __init__(self, folder: Path, at: int, when: str) -> None:
        self.store, self.folder, self.at, self.when = open_store(folder), folder, at, when
        self.url, self.n_puts = self.store.url, 0
        self.get, self.names, self.delete = self.store.get, self.store.names, self.store.delete

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        self.n_puts += 1
        if self.n_puts != self.at:
            return self.store.put(name, pieces)
        if self.when == "within":
            data = b"".join(pieces)
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(data[: len(data) // 2])
        elif self.when == "after":
            self.store.put(name, pieces)
        os._exit(9)


def work_and_die(folder: Path, policy: str, at: int, when: str) -> None:
    work(DeadlyStore(folder, at, when), policy, SAVES)


@dataclass
class Uninterrupted:
    """The same work without a death. after: the rows that come back after so many puts; None: no checkpoint yet."""

    puts: list[str]
    after: list[tuple[Values, bytes] | None]


class Recorder(RamStore):
    def __init__(self) -> None:
        super().__init__()
        self.puts: list[str] = []
        self.after: list[tuple[Values, bytes] | None] = [None]

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        super().put(name, pieces)
        self.puts.append(name)
        if name.startswith("manifests/"):
            rows = empty()
            report = restore(self, rows)
            assert report is not None
            assert report.state is not None
            self.after.append((values(rows), report.state))
        else:
            self.after.append(self.after[-1])


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, Uninterrupted]:
    found = {}
    for policy in POLICIES:
        store = Recorder()
        work(store, policy, SAVES)
        found[policy] = Uninterrupted(store.puts, store.after)
    return found


@pytest.mark.processes
@pytest.mark.parametrize("when", ["before", "within", "after"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_process_that_dies_at_any_write_leaves_the_checkpoint_before_it(
    tmp_path: Path, uninterrupted: dict[str, Uninterrupted], policy: str, when: str
) -> None:
    reference = uninterrupted[policy]
    for at in range(1, len(reference.puts) + 1):
        folder = tmp_path / str(at)
        process = SPAWN.Process(target=work_and_die, args=(folder, policy, at, when))
        process.start()
        process.join()
        died_at = reference.puts[at - 1]
        assert process.exitcode == 9 if not died_at.endswith("closed") else process.exitcode in (0, 9), died_at
        process.close()
        expected, rows = reference.after[at if when == "after" else at - 1], empty()
        if expected is None and when == "within" and died_at.startswith("manifests/"):
            with pytest.raises(Damaged, match="cut off"):  # reported: half a manifest could be all that is left of many
                restore(open_store(folder), rows)
            continue
        report = restore(open_store(folder), rows)
        if expected is None:
            assert report is None
            continue
        assert report is not None
        assert report.state == expected[1]
        assert_same(values(rows), expected[0])
        if when == "within" and died_at.startswith("manifests/"):
            assert report.skipped[0].name == died_at


# --- killed at random instants ----------------------------------------------------------------------------------------


def work_until_killed(folder: Path, policy: str, working: object) -> None:
    working.set()  # type: ignore[attr-defined]
    work(open_store(folder), policy, 1_000_000)


class History:
    """What training without any death would have made of each row, step by step."""

    def __init__(self) -> None:
        self.rows = make()
        self.versions = {name: {array[i].tobytes(): 0 for i in range(len(array))} for name, array in self.now.items()}
        self.at = {0: self.now}

    @property
    def now(self) -> Values:
        return values(self.rows)

    def reach(self, step: int) -> None:
        while self.rows.last_step < step:
            train(self.rows, 1, seed=1)
            self.at[self.rows.last_step] = self.now
            for name, array in self.now.items():
                changed = (array != self.at[self.rows.last_step - 1][name]).any(axis=1)
                self.versions[name].update({row.tobytes(): self.rows.last_step for row in array[changed]})
            self.at.pop(self.rows.last_step - 200, None)


@pytest.mark.processes
@pytest.mark.timeout(300 + 5 * KILLS)
@pytest.mark.parametrize("policy", POLICIES)
def test_killed_at_random_instants_it_always_finds_its_way_back(tmp_path: Path, policy: str) -> None:
    rng, history, reached = np.random.default_rng(0), History(), 0
    for _ in range(-(-KILLS // len(POLICIES))):
        working = SPAWN.Event()
        process = SPAWN.Process(target=work_until_killed, args=(tmp_path, policy, working))
        process.start()
        working.wait()
        process.join(float(rng.uniform(0.0, 0.5)))  # the instant is what is random
        assert process.exitcode is None
        os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        process.join()
        assert process.exitcode == -signal.SIGKILL
        process.close()
        rows = empty()
        report = restore(open_store(tmp_path), rows)
        if report is None:
            assert reached == 0
            continue
        assert report.step >= reached
        reached = report.step
        assert report.state == b"step %d" % reached
        assert all("cut off" in skipped.why for skipped in report.skipped)  # a manifest that was being written
        history.reach(reached)
        if policy == "mfu":  # rows that were not chosen are of earlier steps, but whole
            for name, array in values(rows).items():
                assert all(history.versions[name].get(row.tobytes(), reached + 1) <= reached for row in array)
        else:
            assert_same(values(rows), history.at[reached])


# --- damage ----------------------------------------------------------------------------------------------------------


@dataclass
class Saves:
    """A base, partial saves, another base, partial saves; the rows and state of each."""

    made: list[Manifest]
    objects: dict[str, bytes]
    expected: list[tuple[Values, bytes]]

    def store(self) -> RamStore:
        store = RamStore()
        store.objects = dict(self.objects)
        return store

    def newest_without(self, damaged: set[str]) -> int | None:
        """The newest checkpoint that needs none of these objects."""
        by_name = {manifest.name: manifest for manifest in self.made}
        for number in reversed(range(len(self.made))):
            at, needed = self.made[number].name, set(objects_of(self.made[number]))
            while at is not None:
                needed |= {at, *(blob.name for blob in by_name[at].blobs)}
                at = by_name[at].parent  # type: ignore[assignment]
            if not needed & damaged:
                return number
        return None


@pytest.fixture(scope="module", params=POLICIES)
def saves(request: pytest.FixtureRequest) -> Saves:
    store, expected = RamStore(), []
    saver = Saver(make(), store, replace(BY_POLICY[request.param], level=1))
    for turn in range(6):
        saver.save("full" if turn == 3 else None)
        rows = empty()
        report = restore(store, rows)
        assert report is not None
        assert report.state is not None
        expected.append((values(rows), report.state))
        train(saver.rows, 2, seed=1)
    return Saves(saver.made, store.objects, expected)


def assert_damage_is_found(saves: Saves, store: RamStore, damaged: set[str]) -> None:
    """The damaged objects are named, and what comes back is the newest checkpoint that needs none of them."""
    number, rows = saves.newest_without(damaged), empty()
    if number is None:
        with pytest.raises(Damaged) as died:
            restore(store, rows)
        assert any(name in str(died.value) for name in damaged)
        return
    report = restore(store, rows)
    assert report is not None
    assert report.manifest.name == saves.made[number].name
    assert report.state == saves.expected[number][1]
    assert_same(values(rows), saves.expected[number][0])
    assert len(report.skipped) >= len(saves.made) - 1 - number - sum(name not in store.objects for name in damaged)
    for skipped in report.skipped:
        assert any(name in skipped.why for name in damaged)


def some_name(saves: Saves, rng: np.random.Generator) -> str:
    return str(rng.choice(sorted(saves.objects)))


@pytest.mark.slow
@pytest.mark.timeout(300 + FLIPS // 5)
def test_any_flipped_bit_is_found(saves: Saves) -> None:
    rng = np.random.default_rng(1)
    for _ in range(-(-FLIPS // len(POLICIES))):
        store, name = saves.store(), some_name(saves, rng)
        data = bytearray(store.objects[name])
        bit = int(rng.integers(8 * len(data)))
        data[bit // 8] ^= 1 << bit % 8
        store.objects[name] = bytes(data)
        assert_damage_is_found(saves, store, {name})


@pytest.mark.slow
def test_any_object_cut_short_or_deleted_is_found(saves: Saves) -> None:
    rng = np.random.default_rng(2)
    for name in sorted(saves.objects):
        for keep in {0, int(rng.integers(len(saves.objects[name]))), len(saves.objects[name]) - 1}:
            store = saves.store()
            store.objects[name] = store.objects[name][:keep]
            assert_damage_is_found(saves, store, {name})
        store = saves.store()
        del store.objects[name]
        assert_damage_is_found(saves, store, {name})


@pytest.mark.slow
def test_any_two_objects_in_each_others_place_are_found(saves: Saves) -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        one, other = some_name(saves, rng), some_name(saves, rng)
        if saves.objects[one] == saves.objects[other]:
            continue
        store = saves.store()
        store.objects[one], store.objects[other] = store.objects[other], store.objects[one]
        assert_damage_is_found(saves, store, {one, other})
        store = saves.store()
        store.objects[one] = store.objects[other]
        assert_damage_is_found(saves, store, {one})


def test_copies_under_other_names_change_nothing(saves: Saves) -> None:
    store = saves.store()
    for name in saves.objects:
        if name.startswith("blobs/"):
            store.objects[name + "-copy"] = store.objects[name]
    assert_damage_is_found(saves, store, set())


def test_a_manifest_copied_to_a_newer_name_is_not_believed(saves: Saves) -> None:
    store, copy = saves.store(), "manifests/000009-00000001.json"
    store.objects[copy] = store.objects[saves.made[0].name]
    rows = empty()
    report = restore(store, rows)
    assert report is not None
    assert [skipped.name for skipped in report.skipped] == [copy]
    assert_same(values(rows), saves.expected[-1][0])
