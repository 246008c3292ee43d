"""A save says that it is done only when a restore could take it; and until then nothing older goes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from recovery.catalog import chains, claims
from recovery.catalog.retention import gc
from recovery.checkpointer import Checkpointer
from recovery.config import Config
from recovery.errors import BadInput, Damaged
from recovery.format import manifest, row_codec
from recovery.process_checkpointer import ProcessCheckpointer
from recovery.restore import restore
from recovery.selection.selector import Selection
from recovery.storage.store import Store, manifest_names
from recovery.testing import RamStore, train, two_tables, values
from recovery.torch_rows.tensor_rows import TensorRows
from recovery.write.multipart import SaveTarget, commit_parts, save_part
from tests.recovery.holders import assert_same
from tests.recovery.saving import ThroughAPipe

ONE = Config(job="mine", policy="full", keep_last=1, level=0, lease_s=600)
Kind = Callable[..., Checkpointer | ProcessCheckpointer]


class AltersWhatItWrites(RamStore):
    """Flips a bit of every object whose name ends so, on request."""

    def __init__(self) -> None:
        super().__init__()
        self.ending, self.fired = "", 0

    def put(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        data = bytearray(b"".join(pieces))
        if self.ending and name.endswith(self.ending):
            data[len(data) // 2] ^= 1
            self.fired += 1
        super().put(name, [bytes(data)])


@pytest.fixture(params=["threads", "process"])
def saving(request: pytest.FixtureRequest) -> Kind:
    return Checkpointer if request.param == "threads" else ThroughAPipe


@pytest.fixture
def rows() -> TensorRows:
    return two_tables(2, shared=True)


def step_restored(store: Store) -> int:
    report = restore(store, two_tables(2, seed=None))
    assert report is not None
    return report.step


@pytest.mark.parametrize(
    ("ending", "verify"), [(".json", "sizes"), ("/state", "state"), ("/0000", "bytes"), ("/state", "bytes")]
)
def test_what_cannot_be_restored_is_a_failed_save_and_the_one_before_stays(
    saving: Kind, rows: TensorRows, ending: str, verify: str
) -> None:
    store = AltersWhatItWrites()
    with saving(store, rows, replace(ONE, verify=verify)) as checkpoints:
        checkpoints.save(1, 10, b"state of step 1").result(60)
        before = values(rows)
        store.ending = ending
        train(rows, 1, seed=1)
        with pytest.raises(Damaged, match="cannot be restored, so it was removed again"):
            checkpoints.save(2, 20, b"state of step 2").result(60)
        store.ending = ""
        assert store.fired and step_restored(store) == 1
        into = two_tables(2, seed=None)
        restore(store, into)
        assert_same(values(into), before)
        checkpoints.save(3, 30, b"state of step 3").result(60)
        assert step_restored(store) == 3
    assert len(manifest_names(store)) == 1, "the older one expires once the new one was opened"


@pytest.mark.parametrize(
    ("where", "limit", "says"),
    [
        (row_codec, "STATE_LIMIT_BYTES", "15 bytes, a restore reads at most 10"),
        (manifest, "LIMIT_BYTES", "a restore reads at most 10: raise section_bytes"),
    ],
)
def test_more_than_a_restore_reads_is_refused_before_it_is_written_and_nothing_expires(
    monkeypatch: pytest.MonkeyPatch, ram: RamStore, rows: TensorRows, where: object, limit: str, says: str
) -> None:
    with Checkpointer(ram, rows, ONE) as checkpoints:
        checkpoints.save(1, 10, b"state of step 1").result(60)
        before = getattr(where, limit)
        monkeypatch.setattr(where, limit, 10)
        with pytest.raises(BadInput, match=says):
            checkpoints.save(2, 20, b"state of step 2").result(60)
        monkeypatch.setattr(where, limit, before)
        assert step_restored(ram) == 1 and len(manifest_names(ram)) == 1


def test_sections_too_many_for_a_manifest_are_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, ram: RamStore, rows: TensorRows
) -> None:
    monkeypatch.setattr("recovery.write.section_pipeline.LIMIT_BYTES", 100)
    with pytest.raises(BadInput, match=r"manifest of more than .*raise budget_bytes"):  # noqa: SIM117
        with Checkpointer(ram, rows, replace(ONE, section_bytes=200)):
            pass


def a_checkpoint(store: Store, number: int, step: int | None = None) -> None:
    rows = two_tables(2, seed=None)
    selection = Selection(rows, ONE)
    target = SaveTarget(1, number, "full", None, number if step is None else step, number, rows.schema)
    written = save_part(rows, selection, store, target, ONE)
    commit_parts(store, selection, target, [written], lambda parts: b"s", verify="sizes")


def test_checkpoints_are_ordered_as_numbers_whatever_their_length(ram: RamStore) -> None:
    for number in (99_999_999, 100_000_000, 100_000_001):
        a_checkpoint(ram, number)
    found = [chain.newest.step for chain in chains.chains(ram) if isinstance(chain, chains.Chain)]
    assert found == [100_000_001, 100_000_000, 99_999_999]
    assert step_restored(ram) == 100_000_001


def test_a_number_that_no_name_has_room_for_is_refused_before_rows_are_written(ram: RamStore) -> None:
    with pytest.raises(BadInput, match="cannot be named"):
        a_checkpoint(ram, 10**15)
    assert not ram.objects


def test_a_manifest_that_would_make_no_sense_is_not_written(ram: RamStore) -> None:
    with pytest.raises(BadInput, match=r"no restore would take it: .* step -1"):
        a_checkpoint(ram, 1, step=-1)
    assert not manifest_names(ram)


def test_settings_name_the_ways_to_verify() -> None:
    with pytest.raises(BadInput, match="choose one of sizes, state, bytes"):
        Config(verify="twice")


STRAY = ("manifests/notes of mine.txt", "manifests/000001-backup.json", "blobs/000001-notes.txt")
STRAY += ("blobs/000001-00000001/report.html", "blobs/notes", "claims/000001-to-do.txt", "claims/my list", "readme")


def test_what_people_put_beside_checkpoints_is_passed_over_and_never_collected(tmp_path: Path) -> None:
    from recovery.storage.open import open_store

    store = open_store(tmp_path)
    for name in STRAY:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    a_checkpoint(store, 1)
    store.put("blobs/000001-00000007/0000", [b"of a save that died"])
    store.put("blobs/000001-00000007/part-0001", [b"of a save that died"])
    for job in ("first", "second"):
        claims.release(store, claims.claim(store, job))
    assert step_restored(store) == 1
    found = gc(store)
    assert {name for name in found.objects if not name.startswith("claims/")} == {
        "blobs/000001-00000007/0000", "blobs/000001-00000007/part-0001",
    }  # fmt: skip
    gc(store, really=True)
    assert all((tmp_path / name).read_text() == "mine" for name in STRAY)
    assert step_restored(store) == 1
