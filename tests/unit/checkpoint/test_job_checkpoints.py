"""Which checkpoints a job can resume from."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import gba_hvd.checkpoint.job_checkpoints as checkpoints_module
from gba_hvd import BadInput, Compression
from gba_hvd.callbacks import Event
from gba_hvd.checkpoint.job_checkpoints import JobCheckpoints
from gba_hvd.ps.messages import SaveFacts, SaveStatus
from recovery import CheckpointCallback, state_codec
from recovery.catalog import claims
from recovery.catalog.chains import Chain
from recovery.config import Config
from recovery.errors import Damaged
from recovery.format.manifest import Manifest
from recovery.restore import Report, TrainingPoint
from recovery.restore.row_loader import Age
from recovery.storage.open import open_store
from recovery.testing import Saver
from recovery.torch_rows.tensor_rows import RowParts, TensorRows

DCT, INT8 = Compression.dct(0.1), Compression.dct(0.1).then(Compression.int8)


def checkpoints(spec: Any, **batches: int) -> JobCheckpoints:
    compression = None if spec is None else SimpleNamespace(spec=spec)
    model = SimpleNamespace(**{"global_batch": 16, "micro_batch": 4, **batches}, compression=compression)
    engine: Any = SimpleNamespace(model=model)
    callback: Any = SimpleNamespace(config=Config(policy="full"))
    made: Any = JobCheckpoints(engine, callback)
    made._store = SimpleNamespace(url="file:///runs")
    found: JobCheckpoints = made
    return found


def about(spec: Any) -> dict[str, Any]:
    """What a job with this compressor saves."""
    reported = {"global_batch": 16, "micro_batch": 4}
    return reported if spec is None else {**reported, "compression": checkpoints(spec)._compressor}


@pytest.mark.parametrize(
    ("saved", "mine"),
    [(None, None), (DCT, DCT), (INT8, INT8.always()), (None, DCT), (Compression.none, DCT), (None, Compression.fp16)],
    ids=str,
)
def test_a_checkpoint_of_the_same_compressor_fits_and_so_does_one_of_none(saved: Any, mine: Any) -> None:
    checkpoints(mine).check_fits(about(saved))


@pytest.mark.parametrize(
    ("saved", "mine"), [(DCT, None), (DCT, INT8), (Compression.fp16, Compression.bf16), (INT8, DCT)], ids=str
)
def test_a_checkpoint_of_another_compressor_is_refused(saved: Any, mine: Any) -> None:
    with pytest.raises(BadInput) as caught:
        checkpoints(mine).check_fits(about(saved))
    said = str(caught.value)
    assert f"at file:///runs is of a job with compression={saved}, this one has {mine or 'none'}: what was not" in said
    assert f"would be lost; continue with {saved}, or start over" in said


@pytest.mark.parametrize("name", ["global_batch", "micro_batch"])
def test_a_checkpoint_of_other_batches_is_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"is of a job with {name}=(16|4), this one has 32"):
        checkpoints(None, **{name: 32}).check_fits(about(None))


@pytest.mark.slow
def test_a_place_that_another_job_has_claimed_meanwhile_is_reported(tmp_path: Path) -> None:
    """What was saved before never expires then."""
    events: list[Event] = []
    engine: Any = SimpleNamespace(progress=SimpleNamespace(step=3), emit=events.append)
    mine = JobCheckpoints(engine, CheckpointCallback(str(tmp_path / "store"), policy="delta", lease_s=0.1))
    mine.claim_location("job")
    mine.claim_location("job")
    assert (mine.first_epoch, events) == (1, [])
    claims.claim(mine.store, "other", takeover=True, lease_s=0.1)
    mine.claim_location("job")
    assert mine.first_epoch == 4
    (reported,) = events
    assert (reported.kind, reported.level, reported.data) == ("place_shared", "warning", {"before": 2, "now": 4})
    assert "deletes no checkpoint from before" in reported.message


def test_a_place_that_is_being_written_to_by_another_job_does_not_end_a_running_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    engine: Any = SimpleNamespace(progress=SimpleNamespace(step=3), emit=events.append)
    mine = JobCheckpoints(engine, CheckpointCallback(str(tmp_path / "store"), policy="delta", lease_s=0.1))
    mine.claim_location("job")

    def refused(*_: Any, **__: Any) -> claims.Claim:
        raise BadInput("is being written to by job 'other'")

    monkeypatch.setattr(claims, "claim", refused)
    mine.claim_location("job")
    (reported,) = events
    assert reported.kind == "checkpoint_failed"
    assert "was not claimed again: is being written to by job 'other'" in reported.message


@pytest.mark.parametrize("inner", ["manifests", "blobs/000001-00000001", "claims/"])
@pytest.mark.parametrize("scheme", ["", "file://", "memory://"])
def test_a_location_within_the_folders_of_another_one_is_refused(tmp_path: Path, scheme: str, inner: str) -> None:
    outer = f"{scheme}{tmp_path / 'ck'}"
    open_store(outer).put("manifests/000001-00000001.json", [b"{}"])
    with pytest.raises(
        BadInput, match=rf"ck/{inner.rstrip('/')}/? is within the location of .* at {outer}: give {outer} "
    ):
        _ = JobCheckpoints(cast(Any, None), CheckpointCallback(f"{outer}/{inner}", policy="delta")).store
    for other in (f"{outer}/mine", f"{scheme}{tmp_path / 'manifests'}", f"{scheme}{tmp_path / 'claims' / 'ck'}"):
        _ = JobCheckpoints(cast(Any, None), CheckpointCallback(other, policy="delta")).store


def test_a_location_whose_outer_folder_cannot_be_listed_is_taken(tmp_path: Path) -> None:
    (tmp_path / "claims").mkdir()
    (tmp_path / "manifests").touch()
    _ = JobCheckpoints(cast(Any, None), CheckpointCallback(f"{tmp_path}/claims/ck", policy="delta")).store


class Place:
    """Jobs that save to one place, one after the other. Every row of a job's checkpoint has a value of its own."""

    def __init__(self, url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url, self.store, self.events = url, open_store(str(url)), list[Event]()
        self.rows = rows_of(0.0)
        monkeypatch.setattr(checkpoints_module, "ShardRows", lambda *_, **__: self.rows)

    def job(self, **settings: Any) -> JobCheckpoints:
        engine: Any = SimpleNamespace(progress=SimpleNamespace(step=3), emit=self.events.append)
        return JobCheckpoints(engine, CheckpointCallback(str(self.url), policy="delta", lease_s=0.1, **settings))

    def save(self, epoch: int, value: float) -> Manifest:
        return Saver(rows_of(value), self.store, epoch=epoch).save("full")

    def spoil(self, manifest: Manifest) -> None:
        """Other bytes, as many as before: seen only when they are read."""
        blob = manifest.blobs[0]
        (self.url / blob.name).write_bytes(bytes(blob.n_bytes))

    def filled(self, job: JobCheckpoints) -> float | None:
        """The value of the rows that come back to a job that lost a host; None: none do."""
        report = job.fill(None, [0], TrainingPoint(3))  # type: ignore[arg-type]
        return None if report is None else float(self.rows.tables["t"].weight[0, 0])


def rows_of(value: float) -> TensorRows:
    return TensorRows({"t": RowParts(torch.full((5, 2), value))})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    return Place(tmp_path / "store", monkeypatch)


def test_a_job_that_started_over_beside_another_ones_checkpoints_takes_no_row_of_them(place: Place) -> None:
    place.save(1, 1.0)
    job = place.job(resume=False)
    job.claim_location("job")
    assert job.location() == {"first_epoch": 2, "epochs": [2], "resumed_epoch": 0}
    assert place.filled(job) is None
    own = place.save(2, 2.0)
    assert place.filled(job) == 2.0
    place.spoil(own)
    with pytest.raises(Damaged, match="000002-00000001"):
        place.filled(job)


def test_a_job_resumes_from_the_newest_checkpoint_whose_training_state_can_be_read(place: Place) -> None:
    whole = state_codec.encode(dict.fromkeys(("model", "optimizer", "values", "position", "callbacks")))
    good = Saver(rows_of(1.0), place.store, epoch=1).save("full", whole)
    junk = Saver(rows_of(2.0), place.store, epoch=2).save("full", b"junk")
    report = place.job().fill(None, [0], None)  # type: ignore[arg-type]
    assert report is not None and (report.manifest.name, report.state) == (good.name, whole)
    assert float(place.rows.tables["t"].weight[0, 0]) == 1.0
    (skipped,) = report.skipped
    assert skipped.words.startswith(f"{junk.name}: its 4 bytes of training state cannot be read")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("about", "resume", "first"),
    [
        ({"job": "job", "first_epoch": 1}, True, 1),
        ({"job": "job"}, True, 2),
        ({"job": "other", "first_epoch": 1}, True, 3),
        ({"job": "job", "first_epoch": 1}, False, 3),
    ],
    ids=["the same job", "of an older version", "another job", "starts over"],
)
def test_what_earlier_launches_of_the_job_saved_is_its_own(
    place: Place, about: dict[str, Any], resume: bool, first: int
) -> None:
    for epoch in (1, 2):
        claims.claim(place.store, f"job.{epoch}", takeover=True, lease_s=0.1)
        Saver(rows_of(1.0), place.store, epoch=epoch).save("full", about=about)
    job = place.job(resume=resume)
    job.job_to_resume()
    job.claim_location("job")
    assert job.location() == {"first_epoch": first, "epochs": [3], "resumed_epoch": 0}


@pytest.mark.slow
def test_a_job_whose_place_another_one_took_goes_on_from_its_own_checkpoints(place: Place) -> None:
    resumed = place.save(1, 1.0)
    job = place.job()
    job.claim_location("job")
    job.resume_point(Report((Chain((resumed,))), 5, 0, Age(0, 0.0, 0), None, 0.0, None, 0, 1.0, None, ()))
    assert place.filled(job) == 1.0
    own = place.save(2, 2.0)
    claims.claim(place.store, "other", takeover=True, lease_s=0.1)
    place.save(3, 3.0)
    job.claim_location("job")
    assert [event.kind for event in place.events] == ["place_shared"]
    assert (job.first_epoch, place.filled(job)) == (4, 2.0)
    place.spoil(own)
    assert place.filled(job) == 1.0
    late_joiner = place.job()  # it gets it from the chief
    late_joiner.load_location(job.location())
    assert place.filled(late_joiner) == 1.0


def test_a_chief_that_died_after_its_claim_is_not_another_job(place: Place) -> None:
    job = place.job()
    job.claim_location("job")
    dead = place.job()
    dead.load_state(job.state())
    dead.claim_location("job")  # and reports it to nobody
    job.claim_location("job")
    assert (job.first_epoch, place.events) == (1, [])


@pytest.mark.slow
def test_a_worker_adopts_the_newer_claim_of_its_chief_and_no_older_one(place: Place) -> None:
    chief, worker = place.job(), place.job()
    chief.claim_location("job")
    worker.load_state(before := chief.state())
    claims.claim(place.store, "other", takeover=True, lease_s=0.1)
    chief.claim_location("job")
    claim = claims.Claim(**chief.state()["claim"])
    for _ in range(2):  # it comes with each heartbeat
        worker.adopt_claim(claim, chief.first_epoch)
    assert worker.state()["claim"] == chief.state()["claim"] and worker.location() == chief.location()
    worker.adopt_claim(claims.Claim(**before["claim"]), 1)
    assert worker.state()["claim"] == chief.state()["claim"] and worker.location() == chief.location()


@pytest.mark.slow
def test_a_job_that_goes_on_from_memory_expires_nothing_that_was_saved_while_it_was_gone(place: Place) -> None:
    job = place.job()
    job.claim_location("job")
    left = job.state()
    claims.claim(place.store, "other", takeover=True, lease_s=0.1)
    again = place.job()
    again.claim_location("job", again.resume_from_memory(left, step=3))
    assert [(event.kind, event.data) for event in place.events] == [("place_shared", {"before": 1, "now": 3})]
    assert again.first_epoch == 3
    untouched = place.job()
    untouched.claim_location("job", untouched.resume_from_memory(again.state(), step=3))
    assert (untouched.first_epoch, len(place.events)) == (3, 1)


def test_a_part_that_failed_is_told_also_where_an_earlier_world_had_higher_numbers(tmp_path: Path) -> None:
    events: list[Event] = []
    server = SimpleNamespace(is_ready=lambda: True, saved=None)
    engine: Any = SimpleNamespace(
        world=SimpleNamespace(rank=1),
        progress=SimpleNamespace(step=12),
        signals=SimpleNamespace(preempt_deadline_s=None),
        host=SimpleNamespace(server=server),
        emit=lambda event, only_here: events.append(event),
    )
    mine = JobCheckpoints(engine, CheckpointCallback(str(tmp_path / "store"), policy="delta"))
    told = []
    for epoch, number in ((1, 40), (1, 40), (2, 12), (2, 12), (2, 13)):
        server.saved = SaveStatus(epoch, number, "failed", SaveFacts(why="the disk is full"))
        fields = torch.zeros(mine.n_fields())
        mine.before_commit(fields)
        told.append(fields[2].item())
    assert told == [1, 0, 1, 0, 1]
    assert len(events) == 3
