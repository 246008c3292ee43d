"""Reading ahead of the training: what is read, in which order, what is thrown away, and what ends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gba_hvd
from gba_hvd.reading import frames
from gba_hvd.reading.batch_size import n_samples_of
from gba_hvd.reading.datasets import reads
from gba_hvd.reading.read_ahead import ReadAhead, Share
from gba_hvd.reading.settings import ReadSettings
from gba_hvd.shm.process_state import is_alive
from tests.unit.shm.test_shard_memory import until


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """A map-style dataset of torch: samples are dicts."""

    def __init__(self, n: int = 50) -> None:
        rng = np.random.default_rng(3)
        self.user, self.item = rng.integers(0, 20, n), rng.integers(0, 7, n)

    def __len__(self) -> int:
        return len(self.user)

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert type(index) is int
        ids = {"user": int(self.user[index]), "item": int(self.item[index])}
        return {"ids": ids, "dense": np.full(2, index, dtype=np.float32), "label": float(index % 2), "row": index}


class Recorder:
    """Reads a share by returning it, and waits where a test holds it."""

    def __init__(self) -> None:
        self.read: list[Share] = []
        self.held: dict[Share, threading.Event] = {}
        self.begun = threading.Semaphore(0)

    def __call__(self, share: Share) -> Any:
        self.read.append(share)
        self.begun.release()
        if share in self.held:
            assert self.held[share].wait(60)
        if share[0] < 0:
            raise KeyError(f"no micro-batch {share[0]}")
        return ("batch", share)


def shares(*indices: int) -> list[Share]:
    return [(index, 1) for index in indices]


# --- reading ahead ---------------------------------------------------------------------------------------------------


def test_no_more_than_the_depth_is_read_ahead():
    read = Recorder()
    with ReadAhead([read], depth=2) as ahead:
        ahead.expect(shares(*range(10)))
        assert read.begun.acquire(timeout=60)
        assert read.begun.acquire(timeout=60)
        assert not read.begun.acquire(timeout=0.05)
        assert [ahead.read((i, 1)) for i in range(3)] == [("batch", (i, 1)) for i in range(3)]
        for _ in range(3):
            assert read.begun.acquire(timeout=60)
    assert read.read == shares(*range(5))


def test_what_was_announced_and_does_not_come_is_thrown_away_also_while_it_is_read():
    read = Recorder()
    read.held[0, 1] = threading.Event()
    with ReadAhead([read, read], depth=3) as ahead:
        ahead.expect(shares(0, 1, 2))
        assert read.begun.acquire(timeout=60)
        ahead.expect(shares(7, 8))
        assert ahead.read((7, 1)) == ("batch", (7, 1))
        assert ahead.read((5, 1)) == ("batch", (5, 1))  # a lease: not announced
        read.held[0, 1].set()
        assert ahead.read((8, 1)) == ("batch", (8, 1))  # read again: the lease dropped it
    assert set(read.read) <= set(shares(0, 1, 2, 5, 7, 8))


def test_what_is_announced_first_is_read_before_what_was_announced_earlier():
    """A lease that was not expected does not wait for those that were."""
    read = Recorder()
    read.held[0, 1] = threading.Event()
    with ReadAhead([read], depth=4) as ahead:
        ahead.expect(shares(0, 1, 2, 3))
        assert read.begun.acquire(timeout=60)
        ahead.expect(shares(9, 1, 2, 3))
        read.held[0, 1].set()
        assert ahead.read((9, 1)) == ("batch", (9, 1))
        assert [ahead.read((i, 1)) for i in (1, 2, 3)] == [("batch", (i, 1)) for i in (1, 2, 3)]
    assert read.read == shares(0, 9, 1, 2, 3)


def test_what_is_announced_again_in_the_same_order_is_read_once():
    read = Recorder()
    with ReadAhead([read], depth=3) as ahead:
        for step in range(6):
            ahead.expect(shares(*range(step, 6)))
            assert ahead.read((step, 1)) == ("batch", (step, 1))
    assert read.read == shares(*range(6))


def test_a_failed_read_is_raised_for_its_own_batch_and_never_if_that_is_not_needed():
    with ReadAhead([Recorder()], depth=4) as ahead:
        ahead.expect(shares(0, -1, 2))
        assert ahead.read((0, 1)) == ("batch", (0, 1))
        with pytest.raises(KeyError, match="no micro-batch -1"):
            ahead.read((-1, 1))
        assert ahead.read((2, 1)) == ("batch", (2, 1))
        ahead.expect(shares(-2, 3))
        assert ahead.read((3, 1)) == ("batch", (3, 1))


def test_closing_twice_is_allowed_and_leaves_no_thread():
    ahead = ReadAhead([Recorder(), Recorder()], depth=2).__enter__()
    ahead.close()
    ahead.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gba-hvd reader")]


# --- datasets --------------------------------------------------------------------------------------------------------


def test_a_map_style_dataset_is_collated():
    batch = reads(Samples())(np.array([4, 1]))
    assert batch["row"].tolist() == [4, 1]
    assert batch["dense"].shape == (2, 2)
    assert reads(Samples(), collate_fn=len)(np.arange(3)) == 3


def test_several_samples_at_once_are_read_by_getitems():
    class Several(Samples):
        def __getitems__(self, rows: list[int]) -> list[int]:
            return [-row for row in rows]

    assert reads(Several(), collate_fn=tuple)(np.array([2, 5])) == (-2, -5)


@pytest.mark.parametrize("settings", [{"prefetch": 0}, {"prefetch": 3}])
def test_training_on_a_map_style_dataset_reads_every_sample_once(training: Callable[..., Any], settings: Any):
    job = training()
    rows = []
    for batch in gba_hvd.batches(Samples(), job.state, **settings):
        rows += batch["row"].tolist()
        job.optimizer.zero_grad()
        out = job.tables(batch["ids"])
        logits = job.model.mlp(torch.cat([out["user"], out["item"], batch["dense"]], dim=1)).squeeze(1)
        torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["label"].float()).backward()
        job.optimizer.step()
    assert sorted(rows) == list(range(50))
    assert job.state.samples.applied == 50


def dropping_bad_ones(samples: list[dict[str, Any]]) -> Any:
    return torch.utils.data.default_collate([sample for sample in samples if sample["row"] % 4])


class Pairs(Samples):
    """Samples as many datasets of torch have them."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return sample["ids"], sample["dense"], sample["label"]


class TwiceAsMuch(Samples):
    def take(self, rows: np.ndarray) -> Any:
        return torch.utils.data.default_collate([self[int(row)] for row in np.concatenate([rows, rows])])


@pytest.mark.parametrize(
    ("dataset", "how"),
    [
        (Samples(), {"collate_fn": dropping_bad_ones}),
        (Samples(), {"collate_fn": dropping_bad_ones, "prefetch": 0}),
        (TwiceAsMuch(), {}),
        (Pairs(), {"collate_fn": lambda samples: torch.utils.data.default_collate(samples[1:])}),
    ],
)
def test_a_batch_of_another_number_of_samples_is_refused(training: Callable[..., Any], dataset: Any, how: Any):
    job = training()
    with pytest.raises(gba_hvd.BadInput, match=r"micro-batch \d+: the batch has \d samples, and 4 were to be read"):
        next(gba_hvd.batches(dataset, job.state, shuffle=False, **how))
    assert job.state.samples.total == 0


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"labels": torch.zeros(3, 2), "ids": {"a": torch.zeros(9)}}, 3),
        ({"ids": {"a": gba_hvd.Bag(torch.zeros(9).long(), torch.zeros(5).long()), "b": torch.zeros(5, 2)}}, 5),
        ({"ids": {"a": torch.zeros(5), "negatives": torch.zeros(20)}}, None),
        (({"a": torch.zeros(4)}, torch.zeros(4, 3), np.zeros(4)), 4),
        ((torch.zeros(9), torch.zeros(4)), None),  # packed values, and where each sample starts
        (torch.zeros(9), None),
        ([torch.tensor(1.0), torch.zeros(3)], None),
        (object(), None),
    ],
)
def test_how_many_samples_a_batch_has_is_found_where_it_can_be_known(batch: Any, found: int | None):
    assert n_samples_of(batch) == found


def with_negatives(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples * 5)
    return {**batch, "label": torch.cat([batch["label"][: len(samples)], torch.zeros(4 * len(samples))])}


def time_first(samples: list[Any]) -> Any:
    return torch.zeros(7, len(samples)), torch.zeros(7, len(samples))


@pytest.mark.parametrize(
    ("collate_fn", "n_samples"),
    [
        (with_negatives, lambda batch: len(batch["label"]) // 5),
        (time_first, lambda batch: batch[0].size(1)),
    ],
)
def test_how_many_samples_a_batch_was_made_of_may_be_given(
    training: Callable[..., Any], collate_fn: Any, n_samples: Callable[[Any], int]
):
    def first(**how: Any) -> Any:
        return next(gba_hvd.batches(Samples(), training().state, collate_fn=collate_fn, **how))

    with pytest.raises(gba_hvd.BadInput, match=r"and 4 were to be read.* pass n_samples=lambda batch: \.\.\."):
        first()
    assert n_samples(first(n_samples=n_samples)) == 4
    with pytest.raises(gba_hvd.BadInput, match="the batch has 5 samples, and 4 were to be read"):
        first(n_samples=lambda batch: n_samples(batch) + 1)


def test_ids_are_looked_for_only_where_no_label_shows_how_many_samples_there_are(training: Callable[..., Any]):
    asked: list[Any] = []
    next(
        gba_hvd.batches(Samples(), training().state, ids=lambda batch: asked.append(batch) or batch["ids"], prefetch=0)
    )
    assert asked == []


def test_ids_that_a_function_finds_are_looked_at(training: Callable[..., Any]):
    job, batch = training(), (torch.zeros(4), torch.zeros(9))
    dataset = type("Packed", (Samples,), {"take": lambda self, rows: batch})()
    with pytest.raises(gba_hvd.BadInput, match="the batch has 3 samples"):
        next(gba_hvd.batches(dataset, job.state, ids=lambda batch: {"user": torch.zeros(3).long()}))


@pytest.mark.slow
def test_reading_ahead_changes_no_value(training: Callable[..., Any], clicks: Callable[..., Any]):
    plain, ahead = training(), training()
    for _ in range(2):
        plain.epoch(clicks(50), seed=4)
        ahead.epoch(clicks(50), seed=4, prefetch=3)
    for name, values in plain.all_dense().items():
        np.testing.assert_array_equal(values, ahead.all_dense()[name])


def test_leaving_the_loop_and_failures_end_the_threads(training: Callable[..., Any], clicks: Callable[..., Any]):
    job = training()
    source = gba_hvd.batches(clicks(50), job.state, prefetch=2)
    next(source)
    source.close()

    def fails() -> None:
        for _ in gba_hvd.batches(clicks(50), job.state, prefetch=2):
            raise KeyError("of the user")

    with pytest.raises(KeyError):
        fails()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("gba-hvd reader")]


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": -1}, "num_workers must be a whole number"),
        ({"num_workers": True}, "num_workers must be a whole number"),
        ({"prefetch": 1.5}, "prefetch must be a whole number"),
        ({"num_workers": 2, "prefetch": 0}, "num_workers=2 with prefetch=0"),
        ({"worker_init_fn": print}, "num_workers=0 starts none"),
        ({"collate_fn": 3}, "collate_fn must be a function"),
        ({"pin_memory": True}, "pin_memory=True is for copies to a GPU"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: dict[str, Any], message: str):
    if "pin_memory" in settings and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(gba_hvd.BadInput, match=message):
        ReadSettings(**settings)


def test_datasets_that_cannot_be_read_by_number_and_functions_beside_take_are_refused(clicks: Callable[..., Any]):
    with pytest.raises(gba_hvd.BadInput, match="Stream cannot be read by number"):
        reads(Stream())  # type: ignore[arg-type]
    with pytest.raises(gba_hvd.BadInput, match="generator cannot be read by number"):
        reads(x for x in range(3))  # type: ignore[arg-type]
    with pytest.raises(gba_hvd.BadInput, match="collate_fn would not be called"):
        reads(clicks(50), collate_fn=list)
    with pytest.raises(gba_hvd.BadInput, match="a DataLoader cuts the batches of one process: pass its dataset"):
        reads(torch.utils.data.DataLoader([1, 2]))  # type: ignore[arg-type]


# --- what is sent between processes ----------------------------------------------------------------------------------


def test_what_is_sent_arrives_as_it_was():
    tensors = [
        torch.arange(6).reshape(2, 3).T,
        torch.zeros(0, 4),
        torch.tensor(2.5),
        torch.ones(3, dtype=torch.bfloat16),
    ]
    sent = gba_hvd.Batch({"user": tensors[0][0]}, tensors[1], tensors[2], index=7), tensors, {"a": np.arange(5.0)}
    batch, got, arrays = frames.unpacked(bytearray(frames.joined(frames.packed(sent))))
    assert (batch.index, batch.ids["user"].tolist()) == (7, [0, 3])
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, got, strict=True))
    got[0][0, 0] = 9  # written to
    np.testing.assert_array_equal(arrays["a"], np.arange(5.0))


# --- processes -------------------------------------------------------------------------------------------------------

DRAWS = """
import os, pathlib, random, signal, sys
import numpy as np, torch
import gba_hvd
from gba_hvd.errors import GbaError
from gba_hvd.reading.reader_processes import ReaderProcesses, ReaderDied

assert __name__ == "__main__", "the script runs once"

class Failure(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")

class Draws:
    big = np.arange(100_000)
    def __len__(self):
        return 10
    def take(self, rows):
        assert gba_hvd.Batch is not None  # a class of the script refers to the package
        if rows[0] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if rows[0] == 8:
            raise KeyError("row 8")
        if rows[0] == 9:
            raise Failure("cannot be", "made again")
        return Read(self.number, os.getpid(), rows, (random.random(), np.random.rand(), torch.rand(1).item()))

class Read:
    def __init__(self, *values):
        self.values = values

dataset = Draws()
def init(number):
    Draws.number = number

with ReaderProcesses(dataset, None, 2, init) as readers:
    one, two = readers.take(0, np.array([1]), 5), readers.take(1, np.array([1]), 5)
    assert isinstance(one, Read), "the script's own class comes back as itself"
    assert (one.values[0], two.values[0]) == (0, 1)
    assert len({one.values[1], two.values[1], os.getpid()}) == 3
    assert one.values[3] == two.values[3] != readers.take(0, np.array([1]), 6).values[3]
    for row, kind in ((8, KeyError), (9, GbaError)):
        try:
            readers.take(0, np.array([row]), 0)
        except kind as error:
            assert "take" in str(getattr(error, "__notes__", "")) + str(error)
        else:
            raise SystemExit("nothing was raised")
    try:
        readers.take(1, np.array([7]), 0)
    except ReaderDied as error:
        assert "reader process 1 of 2" in str(error) and "SIGKILL" in str(error) and str(two.values[1]) in str(error)
    else:
        raise SystemExit("nothing was raised")
    readers.take(0, np.array([2]), 0)
assert not pathlib.Path(f"/proc/{one.values[1]}").exists()
dataset.lock = __import__("threading").Lock()
try:
    with ReaderProcesses(dataset, None, 1, None):
        pass
except ValueError as error:
    assert "cannot be: TypeError" in str(error), error
else:
    raise SystemExit("nothing was raised")
del dataset.lock
readers = ReaderProcesses(dataset, None, 2, init).__enter__()
pids = [readers.take(n, np.array([0]), 0).values[1] for n in range(2)]
launcher = int(pathlib.Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[1])
print(*pids, launcher, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.processes
def test_reader_processes_read_fail_die_and_end_with_a_killed_worker(tmp_path: Path):
    (tmp_path / "draws.py").write_text(DRAWS)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "draws.py")], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3
    assert until(lambda: not any(map(is_alive, pids)))
