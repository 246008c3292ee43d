"""A served model takes over what a job saves: whole updates, in order, and none that is damaged."""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.cli import main
from gba_hvd_tools.commands.model import _show_update
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.load import OpenModel
from gba_hvd.serving.shared_lock import SharedLock
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.layout import keys_of_ids
from recovery.catalog.retention import Keep, delete, expired
from recovery.catalog.rollback import plan_rollback, roll_back
from recovery.config import Config
from recovery.errors import StoreError
from recovery.format.manifest import Manifest
from recovery.rows import NO_KEY
from recovery.selection.selector import Selection
from recovery.state_codec import encode
from recovery.storage.open import open_store
from recovery.storage.store import manifest_sizes
from recovery.write.multipart import SaveTarget, commit_parts, save_part
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated
from tests.unit.serving.test_http_server import answered
from tests.unit.serving.test_save_and_load import Trained, raw_users


class Saving:
    """A job that trains and saves: `train` changes some rows and the dense part, `save` makes a checkpoint."""

    def __init__(self, model: nn.Module, url: Path, policy: str = "delta", **settings: Any) -> None:
        self.model, self.store, self.config = model, open_store(url), Config(policy=policy, **settings)
        self.rows: Any = ShardRows(model.tables.memory)
        self.selection = Selection(self.rows, self.config)
        self.made: list[Manifest] = []
        self.epoch, self.step, self.now_s = 1, 0, 1000.0

    def train(self, ids: np.ndarray | None = None) -> None:
        self.step += 1
        tables: Any = self.model.tables
        known = tables.vocabulary("user") if tables.tables["user"].keys else np.arange(tables.tables["user"].n_rows)
        ids = known[self.step % 7 :: 7].copy() if ids is None else ids
        change_rows(self.model, "user", ids, seed=self.step)
        number, first = tables.layout.place_of_table["user"]
        group, keys = tables.layout.groups[number], keys_of_ids(ids) if tables.tables["user"].keys else ids + first
        tables.memory.count_changed(tables.memory.record_starts(keys, group), group)
        for tensor in self.model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.01)

    def save(self, kind: str | None = None) -> Manifest:
        kind = kind or (self.config.policy if self.made else "full")
        self.now_s += 10
        parent = None if kind == "full" else self.made[-1].name
        target = SaveTarget(self.epoch, len(self.made) + 1, kind, parent, self.step, self.step, self.rows.schema)
        part = save_part(self.rows, self.selection, self.store, target, self.config)
        state = encode({"model": dict(self.model.state_dict())})
        made, _ = commit_parts(
            self.store, self.selection, target, [part], lambda _: state, unix_clock=lambda: self.now_s
        )
        self.made.append(made)
        return made

    def update(self, n: int = 1) -> None:
        for _ in range(n):
            self.train()
            self.save()


class Served:
    """That job, a model that was exported from its first checkpoint, and what follows."""

    def __init__(self, trained: Trained, folder: Path, hashed: bool = False, policy: str = "delta", **how: Any) -> None:
        arguments = {"users": 100, "hashed": hashed}
        self.job = Saving(trained(**arguments), folder / "job", policy, **how)
        self.job.save()
        gba_hvd.export_model(folder / "job", folder / "m", build=CODE, arguments=arguments, input_example=batch(4))
        self.folder, self.model = folder, gba_hvd.load_for_inference(folder / "m")
        self.one = raw_users(batch(40), self.job.model) if hashed else batch(40, 100)

    def follower(self, **how: Any) -> gba_hvd.Follower:
        return gba_hvd.Follower(self.model, self.folder / "job", clock=lambda: self.job.now_s + 3, **how)

    def start_over(self, trained: Trained, n_saves: int) -> None:
        """The folder is emptied, and another job saves there, whose rows and dense part are all others."""
        shutil.rmtree(self.folder / "job")
        model = trained(users=100)
        for name, table in model.tables.tables.items():
            change_rows(model, name, np.arange(table.n_rows), seed=99)
        self.job, before = Saving(model, self.folder / "job"), self.job
        self.job.now_s = before.now_s + 1000
        self.job.save()
        self.job.update(n_saves - 1)

    def is_equal(self) -> bool:
        return torch.equal(self.model(self.one), evaluated(self.job.model, self.one))


@pytest.fixture
def serve(trained: Trained, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    return lambda **how: Served(trained, tmp_path, **how)


def damage(url: Path, manifest: Manifest) -> None:
    path = url / manifest.blobs[0].name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
def test_each_update_gives_the_predictions_of_the_job(serve: Callable[..., Served], hashed: bool) -> None:
    served = serve(hashed=hashed)
    served.job.train()
    assert not served.is_equal()
    served.job.save()
    follower = served.follower()
    assert (follower.step, follower.lag_s, follower.lag_steps) == (-1, float("inf"), -1)
    first = follower.poll()
    assert first is not None
    assert (first.is_full, first.n_saves, first.step) == (True, 2, 1)
    assert served.is_equal()
    for step in (2, 3, 4):
        served.job.update()
        update = follower.poll()
        assert update is not None
        assert (update.is_full, update.n_saves, update.step, update.lag_s) == (False, 1, step, 3.0)
        assert update.n_rows < 40
        assert served.is_equal()
        assert (follower.step, follower.lag_s, follower.lag_steps) == (step, 3.0, 0)
    assert follower.poll() is None
    served.job.update(3)  # it was behind: they come as one update
    update = follower.poll()
    assert update is not None
    assert (update.is_full, update.n_saves, update.step) == (False, 3, 7)
    assert served.is_equal()


@pytest.mark.slow
def test_a_follower_goes_back_with_the_checkpoints(serve: Callable[..., Served]) -> None:
    served = serve()
    served.job.update()
    expected, back = evaluated(served.job.model, served.one), served.job.made[-1].name
    served.job.update(2)
    follower = served.follower()
    follower.poll()
    assert (follower.step, served.is_equal()) == (3, True)
    roll_back(served.job.store, plan_rollback(served.job.store, back))
    update = follower.poll()
    assert update is not None and (update.step, update.n_saves, follower.lag_steps) == (1, 2, 0)
    assert torch.equal(served.model(served.one), expected)
    assert follower.poll() is None and not follower.flaws


@pytest.mark.slow
def test_ids_that_are_admitted_and_evicted_travel(serve: Callable[..., Served]) -> None:
    served = serve(hashed=True)
    follower, tables = served.follower(), served.job.model.tables
    follower.poll()
    fresh, gone = np.arange(1000, 1010), tables.vocabulary("user")[:5]
    memory, group = tables.memory, tables.layout.groups[tables.layout.place_of_table["user"][0]]
    vocabulary = memory.vocabulary(group)
    rows = vocabulary.rows(keys_of_ids(gone))
    served.job.train(fresh)
    for row in rows:  # as an eviction does
        vocabulary.keys(row % memory.layout.n_shards)[row // memory.layout.n_shards] = NO_KEY
    memory.count_changed(memory.layout.record_starts(rows, group), group)
    served.job.save()
    follower.poll()
    module: Any = served.model
    assert np.array_equal(module.tables.vocabulary("user"), tables.vocabulary("user"))
    assert set(fresh) <= set(module.tables.vocabulary("user").tolist())
    assert not set(gone) & set(module.tables.vocabulary("user").tolist())
    ids = {**served.one.ids, "user": torch.from_numpy(np.concatenate([fresh, gone, np.arange(25)]))}
    one = gba_hvd.Batch(ids, served.one.dense, served.one.label)
    assert torch.equal(served.model(one), evaluated(served.job.model, one))


@pytest.mark.slow
@pytest.mark.parametrize("n_saves", [1, 4, 5, 6, 7])
def test_a_job_that_started_over_in_the_folder_is_loaded_from_its_base(
    serve: Callable[..., Served], trained: Trained, caplog: pytest.LogCaptureFixture, n_saves: int
) -> None:
    """Its manifests have the names of those before, number 5 that of what is served."""
    served = serve()
    follower = served.follower()
    served.job.update(4)
    follower.poll()
    assert follower.poll() is None
    served.start_over(trained, n_saves)
    with caplog.at_level(logging.WARNING, "gba_hvd"), pytest.MonkeyPatch.context() as patch:
        if n_saves == 5:
            follower._verified = manifest_sizes(served.job.store)  # as where its sizes are the same by chance
            assert follower.poll() is None
            patch.setattr("gba_hvd.serving.follower._VERIFIED_FOR_S", 0.0)
        update = follower.poll()
    assert update is not None
    assert (update.is_full, update.n_saves, update.step) == (True, n_saves, n_saves - 1)
    assert served.is_equal()
    assert [record.getMessage() for record in caplog.records] == [
        f"the checkpoints that are served are gone from {served.folder / 'job'}; still serving step 4",
        f"{served.folder / 'job'} is followed again: serving step {n_saves - 1}",
    ]
    served.job.update()
    update = follower.poll()
    assert update is not None and not update.is_full
    assert (served.is_equal(), follower.problem, follower.lag_steps) == (True, "", 0)


@pytest.mark.slow
def test_of_a_job_that_started_over_nothing_is_known_to_be_damaged(
    serve: Callable[..., Served], trained: Trained
) -> None:
    served = serve()
    follower = served.follower()
    follower.poll()
    served.job.update(2)
    damage(served.folder / "job", served.job.made[1])
    assert follower.poll() is None
    assert follower.flaws
    served.start_over(trained, 3)
    follower._verified = manifest_sizes(served.job.store)  # as where its sizes are the same by chance
    damage(served.folder / "job", served.job.made[0])
    assert follower.poll() is None
    assert follower.poll() is None
    assert "still serving step 0" in follower.problem and len(follower.flaws) == 3
    served.job.train()
    served.job.save("full")
    assert follower.poll() is not None
    assert (served.is_equal(), follower.problem, dict(follower.flaws)) == (True, "", {})


@pytest.mark.slow
def test_checkpoints_that_are_away_are_a_problem_until_they_are_back(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    follower, here, away = served.follower(), served.folder / "job", served.folder / "away"
    served.job.update()
    follower.poll()
    words = f"the checkpoints that are served are gone from {here}; still serving step 1"
    with caplog.at_level(logging.WARNING, "gba_hvd"):
        here.rename(away)
        assert follower.poll() is None
        assert follower.poll() is None
        assert (follower.problem, follower.has_ended) == (words, False)
        away.rename(here)
        assert follower.poll() is None
        assert follower.problem == ""
    again = f"{here} is followed again: serving step 1"
    assert [record.getMessage() for record in caplog.records] == [words, again]  # once
    served.job.update()
    update = follower.poll()
    assert update is not None and not update.is_full
    assert served.is_equal()


@pytest.mark.slow
def test_a_look_that_finds_nothing_new_is_one_listing(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served, calls = serve(), []
    follower = served.follower()

    class Counted:
        url = "counted"

        def __getattr__(self, name: str) -> Any:
            return lambda *args: (calls.append((name, args[0])), getattr(served.job.store, name)(*args))[1]

    monkeypatch.setattr(follower, "_store", Counted())
    for _ in range(2):
        assert follower.poll() is not None
        assert follower.poll() is None
        calls.clear()
        assert follower.poll() is None
        assert calls == [("names", "manifests/")]
        served.job.update()


@pytest.mark.slow
def test_a_chain_that_began_anew_is_loaded_from_its_base(serve: Callable[..., Served]) -> None:
    served = serve()
    follower = served.follower()
    follower.poll()
    served.job.update()
    served.job.train()
    served.job.save("full")
    served.job.update(2)
    gone = expired(served.job.made, [one.name for one in served.job.made], Keep(1))
    assert served.job.made[0].name in gone.manifests  # what it has is not there any more
    delete(served.job.store, gone)
    update = follower.poll()
    assert update is not None
    assert (update.is_full, update.n_saves, update.step) == (True, 3, 4)
    assert served.is_equal()


@pytest.mark.slow
def test_a_damaged_update_is_named_and_passed_over_until_a_base_comes(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    follower = served.follower()
    served.job.update()
    follower.poll()
    good = evaluated(served.job.model, served.one)
    served.job.update()
    damage(served.folder / "job", served.job.made[-1])
    flawed = served.job.made[-1].name
    with caplog.at_level(logging.WARNING, "gba_hvd"):
        assert follower.poll() is None
        assert follower.poll() is None
    assert [flawed in record.getMessage() for record in caplog.records] == [True]  # once
    assert "checksum" in follower.flaws[flawed] or "is not what" in follower.flaws[flawed]
    served.job.update(2)
    assert follower.poll() is None
    assert follower.flaws[served.job.made[-1].name] == f"it is on top of {flawed}, which is damaged"
    assert torch.equal(served.model(served.one), good)
    assert (follower.step, follower.lag_steps, follower.lag_s) == (1, 3, 33.0)
    served.job.train()
    served.job.save("full")
    update = follower.poll()
    assert update is not None
    assert update.is_full
    assert served.is_equal()
    assert not follower.flaws


@pytest.mark.slow
def test_what_came_before_a_damaged_update_is_applied(serve: Callable[..., Served]) -> None:
    served = serve()
    follower = served.follower()
    follower.poll()
    served.job.update()
    expected = evaluated(served.job.model, served.one)
    served.job.update(2)
    damage(served.folder / "job", served.job.made[2])
    update = follower.poll()
    assert update is not None
    assert (update.step, follower.lag_steps) == (1, 2)
    assert torch.equal(served.model(served.one), expected)


@pytest.mark.slow
def test_a_manifest_that_is_altered_is_passed_over(serve: Callable[..., Served]) -> None:
    served = serve()
    follower = served.follower()
    served.job.update(2)
    path = served.folder / "job" / served.job.made[-1].name
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-5])
    update = follower.poll()
    assert update is not None
    assert update.step == 1
    assert list(follower.flaws) == [served.job.made[-1].name]


@pytest.mark.slow
def test_a_job_that_rolled_back_is_followed(serve: Callable[..., Served]) -> None:
    """What it saves under a new claim is newer, also at an earlier step."""
    served = serve()
    follower = served.follower()
    served.job.update(4)
    follower.poll()
    served.job.epoch, served.job.step = 2, 1
    served.job.train()
    served.job.save("full")
    follower.poll()
    assert (follower.step, follower.lag_steps) == (2, 0)
    assert served.is_equal()


@pytest.mark.slow
def test_the_most_used_rows_come_first_where_saves_have_a_budget(serve: Callable[..., Served]) -> None:
    served = serve(policy="mfu", row_fraction=0.1)
    served.job.selection._small = frozenset()  # tables of less than 1000 rows are saved whole
    follower = served.follower()
    follower.poll()
    many, once = np.arange(8), np.arange(20, 40)
    served.job.train(once)
    for _ in range(3):
        served.job.train(many)
    served.job.save()
    follower.poll()
    module: Any = served.model
    own = served.job.model.tables.rows("user", np.arange(100))
    same = (module.tables.rows("user", np.arange(100)) == own).all(1)
    assert same[many].all()
    assert 2 <= same[once].sum() < 20  # the rest stays due
    for _ in range(10):
        served.job.save()
    update = follower.poll()
    assert update is not None
    assert (module.tables.rows("user", np.arange(100)) == own).all()
    assert served.is_equal()


@pytest.mark.slow
def test_requests_see_whole_updates_only(serve: Callable[..., Served]) -> None:
    """A thread predicts all the time; each of its answers is that of some update, and they come in order."""
    served = serve()
    follower, seen, stop = served.follower(), [], threading.Event()
    expected = {served.model(served.one).numpy().tobytes(): 0}
    failed: list[BaseException] = []

    def predict() -> None:
        try:
            while not stop.is_set():
                seen.append(served.model(served.one).numpy().tobytes())
                with follower.reading():
                    assert torch.equal(served.model(served.one), served.model(served.one))
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=predict)
    thread.start()
    try:
        for number in range(1, 21):
            served.job.train(np.arange(100))
            served.job.save("full" if number % 5 == 0 else "delta")
            expected[evaluated(served.job.model, served.one).numpy().tobytes()] = number
            while not seen and thread.is_alive():
                stop.wait(0.001)
            assert follower.poll() is not None
            n_seen = len(seen)  # the next answer may have been computed before the update
            while len(seen) < n_seen + 2 and thread.is_alive():
                stop.wait(0.001)
    finally:
        stop.set()
        thread.join()
    assert not failed
    assert set(seen) <= expected.keys()
    numbers = [expected[one] for one in seen]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 21


@pytest.mark.slow
def test_an_answer_over_http_is_of_one_update_and_health_shows_what_is_gone(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gba-hvd model serve --follow`: an update comes after the first of two parts of a request."""
    served, parts, scores, health, pause = serve(), [], [], [], threading.Event()
    served.job.now_s = time.time()
    predict = OpenModel._outputs

    def with_an_update_after(self: OpenModel, value: Any) -> Any:
        follower: Any = self.module.forward.followed_by
        parts.append(follower.step)
        found = predict(self, value)
        if len(parts) == 1:
            served.job.train(np.arange(100))
            served.job.save()
            while follower.step == 0 and not follower._lock._n_waiting:
                pause.wait(0.001)
        return found

    def instead_of_serving(app: Any, listening: Any) -> None:
        row = {"user": 7, "item": 3, "history": [1, 2], "dense": [0.5, 0.25]}
        for n in (5000, 1):
            status, text, _ = answered(app, [json.dumps({"dataframe_records": [row] * n}).encode()])
            assert status == 200, text
            scores.append({one["score"] for one in json.loads(text)["predictions"]})
        (served.folder / "job").rename(served.folder / "away")
        while not health or health[-1] == (200, "\n"):
            health.append(answered(app, [], method="GET", path="/health")[:2])
            pause.wait(0.01)

    monkeypatch.setattr(OpenModel, "_outputs", with_an_update_after)
    monkeypatch.setattr(gba_hvd.Follower, "__enter__", lambda self: (self.poll(), self.start())[1])
    monkeypatch.setattr("gba_hvd.serving.http_server.serve", instead_of_serving)
    words = [served.folder / "m", "--port", 0, "--follow", served.folder / "job"]
    assert main(["model", "serve", *map(str, words)]) == 0
    assert parts[:2] == [0, 0] and len(scores[0]) == 1 and scores[0] != scores[1]
    assert health[-1][0] == 200 and health[-1][1].endswith("; still serving step 1")


@pytest.mark.parametrize("error", [OSError(32, "Broken pipe"), ValueError("I/O operation on closed file")])
def test_an_update_that_cannot_be_printed_is_no_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed:
        def write(self, text: str) -> int:
            written.append(text)
            raise error

    written: list[str] = []
    monkeypatch.setattr("sys.stderr", Closed())
    _show_update(gba_hvd.Update("manifests/000001-00000002.json", 5, 5, 1, False, 3, 100, 0.1, 0.0, 2.0))
    assert written[0].startswith("step 5: 3 rows")


@pytest.mark.slow
def test_an_update_that_fails_halfway_leaves_the_state_before(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    follower = served.follower()
    follower.poll()
    before = served.model(served.one)
    served.job.train(np.arange(100))
    served.job.save()
    gets = []

    def failing(store: Any, manifest: Manifest, count: Any) -> Any:
        from recovery.restore.inspect import saved_rows

        for section in saved_rows(store, manifest, count):
            gets.append(1)
            if len(gets) == 3:
                raise StoreError("planned")
            yield section

    with monkeypatch.context() as patch:
        patch.setattr("gba_hvd.serving.follower.saved_rows", failing)
        with pytest.raises(StoreError, match="planned"):
            follower.poll()
    assert len(gets) == 3
    assert torch.equal(served.model(served.one), before)
    assert follower.poll() is not None
    assert served.is_equal()


@pytest.mark.slow
def test_the_thread_follows_until_it_is_closed(serve: Callable[..., Served]) -> None:
    served, applied, arrived = serve(), [], threading.Event()

    def note(update: gba_hvd.Update) -> None:
        applied.append(update)
        arrived.set()

    follower = served.follower(every_s=0.01, on_update=note)
    with follower:
        assert arrived.wait(60)
        arrived.clear()
        served.job.update()
        assert arrived.wait(60)
        with pytest.raises(BadInput, match="do one or the other"):
            follower.poll()
    assert served.is_equal()
    assert [update.step for update in applied] == [0, 1]
    served.job.update()
    assert not served.is_equal()
    follower.close()
    with served.follower(every_s=0.01, on_update=lambda _: arrived.set()):  # the model can be followed again
        arrived.clear()
        assert arrived.wait(60)


@pytest.mark.slow
def test_closing_raises_what_the_thread_died_of(serve: Callable[..., Served]) -> None:
    served, came = serve(), threading.Event()

    def fails(update: gba_hvd.Update) -> None:
        came.set()
        raise RuntimeError("planned")

    follower = served.follower(on_update=fails).start()
    assert came.wait(60)
    with pytest.raises(RuntimeError, match="planned"):
        follower.close()
    follower.close()


@pytest.mark.slow
def test_what_cannot_be_followed_is_refused(
    serve: Callable[..., Served], trained: Trained, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    with pytest.raises(BadInput, match="was not opened for predictions"):
        gba_hvd.Follower(served.job.model, tmp_path / "job")
    with pytest.raises(BadInput, match="every_s must be positive"):
        served.follower(every_s=0)
    follower = served.follower()
    with pytest.raises(BadInput, match="another Follower"):
        served.follower()
    with follower.reading(), pytest.raises(BadInput, match="outside reading"):
        follower.poll()
    follower.close()
    with caplog.at_level(logging.WARNING, "gba_hvd"):
        empty = gba_hvd.Follower(served.model, tmp_path / "nothing")
        assert empty.poll() is None
        empty.close()
    assert "has no checkpoints yet" in caplog.text
    other = Saving(trained(users=100, width=6, seed=3, hashed=True), tmp_path / "other")
    other.save()
    follower = gba_hvd.Follower(served.model, tmp_path / "other")
    before = served.model(served.one)
    with pytest.raises(BadInput, match="table 'user' is 100 x 4 in the built module, and hashed x 4"):
        follower.poll()
    assert torch.equal(served.model(served.one), before)


def test_a_thread_that_waits_alone_goes_before_those_that_come_later() -> None:
    lock, order = SharedLock(), []
    inside, waits, again = threading.Event(), threading.Event(), threading.Event()

    def request() -> None:
        with lock.shared():
            inside.set()
            waits.wait(60)
            with lock.shared():  # it holds it already
                order.append("held")
            again.set()

    def update() -> None:
        with lock.exclusive():
            order.append("alone")

    def late() -> None:
        with lock.shared():
            order.append("late")

    threads = [threading.Thread(target=request)]
    threads[0].start()
    inside.wait(60)
    threads.append(threading.Thread(target=update))
    threads[1].start()
    while not lock._n_waiting:
        again.wait(0.001)
    threads.append(threading.Thread(target=late))
    threads[2].start()
    waits.set()
    for thread in threads:
        thread.join(60)
    assert order == ["held", "alone", "late"]
