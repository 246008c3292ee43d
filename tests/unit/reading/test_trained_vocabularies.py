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
from gba_hvd.data import Categorical, ClickLog, Hashed, Recipe, RowEncoder, SplitFiles, Vocabulary, prepare
from gba_hvd.data.vocabulary_files import VocabularyDigests, vocabulary_digest, vocabulary_path
from gba_hvd.errors import BadInput, StateMismatch
from gba_hvd.reading.trained_vocabularies import (
    digests_of,
    not_compared,
    of_state,
    other_vocabulary,
    to_state,
    with_digests,
)
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
    assert job.state.engine.progress.vocabularies != with_digests({}, digests_of(other))


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


def digests(*values: str) -> VocabularyDigests:
    found = pa.array(values, pa.large_string())
    return VocabularyDigests("it", {"user": found}.__getitem__, {"user": (len(found), vocabulary_digest(found))})


def test_a_vocabulary_with_more_values_at_its_end_is_the_same_one() -> None:
    trained = with_digests({}, digests("a", "b").digests)
    assert not other_vocabulary(trained, digests("a", "b", "c"))
    for other in (digests("b", "a", "c"), digests("b", "a"), digests("ab", "")):
        assert "table 'user': expected the vocabulary that was trained, 2 values" in other_vocabulary(trained, other)
    assert not other_vocabulary(with_digests({}, {"item": (2, "1234")}), digests("b"))


def test_each_size_of_a_vocabulary_that_grew_is_known() -> None:
    first, grown = digests("a", "b"), digests("a", "b", "c", "d")
    trained = with_digests(with_digests({}, first.digests), grown.digests)
    assert trained == of_state(to_state(trained)) and not other_vocabulary(trained, first)
    assert not not_compared(trained, first) and not not_compared(trained, grown)
    assert "2 values with digest" in other_vocabulary(trained, digests("b", "a"))
    assert "2 values with digest" in other_vocabulary(trained, digests("b", "a", "c"))
    assert "4 values with digest" in other_vocabulary(trained, digests("a", "b", "d", "c"))


def test_fewer_values_than_any_that_were_trained_cannot_be_compared() -> None:
    trained = with_digests({}, digests("a", "b").digests)
    assert not other_vocabulary(trained, digests("a"))
    assert "table 'user': it has 1 values in its vocabulary, fewer than the 2" in not_compared(trained, digests("a"))
    assert not not_compared({}, digests("a"))


def test_the_newest_digests_of_a_table_are_kept_and_the_stored_form_of_one_is_read() -> None:
    trained = of_state({"user": [40, "old"], "item": [2, "1234"]})
    assert trained == {"user": {40: "old"}, "item": {2: "1234"}}
    for n in range(50, 100):
        trained = with_digests(trained, {"user": (n, "new")})
    assert list(trained["user"]) == list(range(68, 100)) and trained["item"] == {2: "1234"}


@pytest.mark.slow
def test_the_first_store_is_trained_and_evaluated_after_one_that_grew(training: Any, stored: Stored) -> None:
    first, grown = stored("first", "abcd"), stored("grown", "aaabbbcccddde")
    assert first.vocabulary_digests and grown.vocabulary_digests
    assert grown.vocabulary_digests.digest_of("user", 4) == digests_of(first)["user"][1]
    job = embedded(training(epoch=0, global_batch=4, micro_batch=2))
    for epoch, log in enumerate((first, grown, first)):
        job.state.epoch = epoch
        job.epoch(log)
    gba_hvd.evaluate(job.model, first, job.state)
    assert "vocabulary_not_compared" not in job.state.engine.reports._reported


@pytest.mark.slow
def test_a_smaller_store_is_evaluated_with_a_warning_that_it_is_not_compared(training: Any, stored: Stored) -> None:
    job = embedded(training(epoch=0, global_batch=4, micro_batch=2))
    job.epoch(stored("first", "abcd"))
    gba_hvd.evaluate(job.model, stored("smaller", "abc"), job.state)
    assert "vocabulary_not_compared" in job.state.engine.reports._reported


@pytest.mark.slow
def test_a_log_without_its_digests_is_not_compared(training: Any, stored: Stored) -> None:
    job = embedded(training(epoch=0, global_batch=4, micro_batch=2))
    job.epoch(stored("first", "abcd"))
    other, job.state.epoch = stored("second", "wxyz"), 1
    with pytest.raises(StateMismatch, match=r"`log\.vocabulary_digests = None`"):
        job.epoch(other)
    other.vocabulary_digests = None
    job.epoch(other)
    gba_hvd.evaluate(job.model, other, job.state)
    assert job.state.samples.applied == 16


@pytest.mark.slow
def test_vocabularies_of_a_store_of_an_earlier_version_are_read_only_by_an_encoder(stored: Stored) -> None:
    log = stored("first", "abcd")
    folder = Path(log.description["path"])
    manifest = json.loads((folder / "dataset.json").read_text())
    stored_ones = {field["name"]: (field["rows"] - 1, field.pop("vocabulary")) for field in manifest["fields"]}
    assert digests_of(pickle.loads(pickle.dumps(log))) == digests_of(log) == stored_ones
    (folder / "dataset.json").write_text(json.dumps(manifest))
    assert digests_of(RowEncoder.open(folder)) == stored_ones
    vocabulary_path(folder, "user").unlink()
    assert digests_of(ClickLog.open(folder)) == {}


@pytest.mark.slow
def test_workers_agree_on_the_vocabularies_before_they_train(
    training: Any, stored: Stored, clicks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[dict[str, int]] = []
    module = sys.modules["gba_hvd.batches"]  # the package has the function of this name
    monkeypatch.setattr(module, "agree_on", lambda world, name, found, sources, parts: facts.append(found))
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


def test_a_store_that_is_to_be_like_another_has_its_min_count(stored: Stored) -> None:
    rare = Recipe("csv", "label", (Categorical("user", Vocabulary(3)), Categorical("item", Hashed(9))))
    stored("first", "abcd")
    words = r"expected Vocabulary \(--min-count 1\) in table 'user', .*got Vocabulary \(--min-count 3\) in table"
    with pytest.raises(BadInput, match=words):
        stored("second", "abcd", like="first", recipe=rare)
