"""Ids of a prepared dataset mean what they meant in the data that the rows were trained with, or it is refused."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import gba_hvd
from gba_hvd.data import Categorical, ClickLog, Recipe, RowEncoder, SplitFiles, prepare
from gba_hvd.data.vocabulary_files import VocabularyDigests, vocabulary_path
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.reading.trained_vocabularies import digests_of, other_vocabulary
from recovery import state_codec

RECIPE = Recipe("csv", "label", (Categorical("user"), Categorical("item")))
Stored = Callable[..., ClickLog]


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    """Prepares users, each with item i1 of label 1 and i2 of label 0."""

    def make(name: str, users: str, like: str | None = None, recipe: Recipe = RECIPE) -> ClickLog:
        rows = "".join(f"1,{one},i1\n0,{one},i2\n" for one in users)
        (tmp_path / f"{name}.csv").write_text(f"label,user,item\n{rows}")
        prepare(
            recipe, SplitFiles({"train": [tmp_path / f"{name}.csv"]}), tmp_path / name, like=like and tmp_path / like
        )
        return ClickLog.open(tmp_path / name)

    return make


def trained(training: Any, log: ClickLog) -> Any:
    """What a checkpoint has of a job that has trained an epoch."""
    job = training(epoch=0, global_batch=4, micro_batch=2)
    embedded(job).epoch(log)
    return state_codec.decode(state_codec.encode(job.state.training_state.state_dict()))


def embedded(job: Any) -> Any:
    """Without the two numbers that logs of these tests do not have."""
    job.model.forward = lambda batch: sum(out.sum(dim=1) for out in job.tables(batch.ids).values())
    return job


def resumed(training: Any, saved: Any, epoch: int = 1) -> Any:
    job = embedded(training(epoch=0, global_batch=4, micro_batch=2))
    job.state.sync()
    job.state.training_state.load_state_dict(saved)
    for shard in range(3):
        job.tables.memory.set_ready(shard, job.state.step)
    job.state.epoch = epoch
    return job


@pytest.mark.slow
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("users", ["wxyz", "wxyzv"], ids=["as many samples", "more samples"])
def test_a_store_with_other_ids_is_refused_at_a_resume_and_evaluates_nothing(
    training: Any, stored: Stored, users: str, epoch: int
) -> None:
    saved = trained(training, stored("first", "abcd"))
    other = stored("second", users)
    job = resumed(training, saved, epoch)
    words = "table 'user': expected the vocabulary that was trained, 4 values .*second: its ids .*--like STORE"
    with pytest.raises(StateMismatch, match=words):
        job.epoch(other)
    with pytest.raises(StateMismatch, match=words):
        gba_hvd.evaluate(job.model, other, job.state)
    assert job.state.engine.progress.vocabularies != digests_of(other)


@pytest.mark.slow
def test_new_data_with_the_ids_of_the_first_store_is_trained(training: Any, stored: Stored) -> None:
    saved = trained(training, stored("first", "abcd"))
    job = resumed(training, saved)
    job.epoch(stored("second", "xdcba", like="first"))
    assert job.state.samples.applied == 8 + 10


@pytest.mark.slow
def test_another_store_in_the_same_process_is_refused(training: Any, stored: Stored) -> None:
    job = embedded(training(epoch=0, global_batch=4, micro_batch=2))
    job.epoch(stored("first", "abcd"))
    job.state.epoch = 1
    with pytest.raises(StateMismatch, match="table 'user': expected"):
        job.epoch(stored("second", "wxyz"))


@pytest.mark.slow
def test_a_checkpoint_without_digests_is_resumed(training: Any, stored: Stored) -> None:
    saved = trained(training, stored("first", "abcd"))
    del saved["position"]["vocabularies"]
    job = resumed(training, saved)
    job.epoch(stored("second", "wxyz"))
    assert job.state.samples.applied == 16


@pytest.mark.slow
def test_a_store_with_the_same_values_is_the_same_one(stored: Stored) -> None:
    first, again, other = stored("first", "abcd"), stored("second", "dcab"), stored("third", "abce")
    assert digests_of(first) == digests_of(again) != digests_of(other)
    assert digests_of(object()) == {}


def test_a_vocabulary_with_more_values_at_its_end_is_the_same_one() -> None:
    def digests(*values: str) -> VocabularyDigests:
        found = {"user": pa.array(values, pa.large_string())}
        return VocabularyDigests("it", found.__getitem__, {"user": None})

    trained = digests("a", "b").digests
    assert not other_vocabulary(trained, digests("a", "b", "c"))
    for other in (digests("b", "a", "c"), digests("b", "a"), digests("a"), digests("ab", "")):
        assert "table 'user': expected the vocabulary that was trained, 2 values" in other_vocabulary(trained, other)
    assert not other_vocabulary({"item": (2, "1234")}, digests("b"))


@pytest.mark.slow
def test_a_store_of_an_earlier_version_has_its_digests_computed(stored: Stored) -> None:
    log = stored("first", "abcd")
    folder = Path(log.description["path"])
    manifest = json.loads((folder / "dataset.json").read_text())
    stored_ones = {field["name"]: (field["rows"] - 1, field.pop("vocabulary")) for field in manifest["fields"]}
    assert digests_of(log) == stored_ones
    (folder / "dataset.json").write_text(json.dumps(manifest))
    assert digests_of(ClickLog.open(folder)) == digests_of(log) == digests_of(RowEncoder.open(folder))
    vocabulary_path(folder, "user").unlink()
    assert digests_of(pickle.loads(pickle.dumps(ClickLog.open(folder)))) == {"item": digests_of(log)["item"]}


@pytest.mark.slow
def test_workers_agree_on_the_vocabularies_before_they_train(
    training: Any, stored: Stored, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[dict[str, int]] = []
    module = sys.modules["gba_hvd.batches"]  # the package has the function of this name
    monkeypatch.setattr(module, "agree_on", lambda world, name, found, sources: facts.append(found))
    for log in (stored("first", "abcd"), stored("second", "dcab"), stored("third", "wxyz"), clicks(8)):
        next(gba_hvd.batches(log, embedded(training(epoch=0, global_batch=4, micro_batch=2)).state))
    first, again, other, none = (one["vocabularies of the dataset"] for one in facts)
    assert first == again != other and none == 0


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((Categorical("user"),), "column 'item': expected Vocabulary.*, as in .*first, got none of this name"),
        ((Categorical("user", table="one"), Categorical("item")), "column 'user': .* in table 'user'.* in table 'one'"),
    ],
)
def test_a_store_that_is_to_be_like_another_has_its_columns(
    stored: Stored, fields: tuple[Categorical, ...], words: str
) -> None:
    stored("first", "abcd")
    with pytest.raises(BadInput, match=words):
        stored("second", "abcd", like="first", recipe=Recipe("csv", "label", fields))
