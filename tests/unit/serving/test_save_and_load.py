"""A model that was saved predicts as the one that was trained, where it is opened, in memory or mapped."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.load import OpenModel
from gba_hvd.serving.manifest import from_json, read_manifest, to_json
from gba_hvd.serving.row_sources import live_rows, step_of_rows
from recovery.errors import Damaged, StoreError
from recovery.storage.open import open_store
from tests.recovery.stores import Crash, FaultyStore
from tests.unit.serving import model_code
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated, objects
from tests.unit.test_without_horovod import BLOCKED

Trained = Callable[..., nn.Module]


def raw_users(one: gba_hvd.Batch, model: nn.Module) -> gba_hvd.Batch:
    """Half of the users have a row of their own."""
    known = model.tables.vocabulary("user")
    unknown = np.random.default_rng(1).integers(-(2**62), 2**62, len(one))
    users = np.where(np.arange(len(one)) % 2, known[: len(one)], unknown)
    return gba_hvd.Batch({**one.ids, "user": torch.from_numpy(users)}, one.dense, one.label)


@pytest.mark.parametrize("tables", ["memory", "mmap", "remote"])
@pytest.mark.parametrize("stored", ["all", "touched"])
@pytest.mark.parametrize("hashed", [False, True])
def test_predictions_are_those_of_the_trained_model(
    trained: Trained, tmp_path: Path, hashed: bool, stored: str, tables: str
) -> None:
    model = trained(users=100, hashed=hashed, touched=20)
    one = raw_users(batch(40), model) if hashed else batch(40, 100)
    was = [module.training for module in model.modules()]
    arguments = {"users": 100, "hashed": hashed}
    saved = gba_hvd.save_model(
        model, tmp_path / "m", build=CODE, arguments=arguments, tables=stored, input_example=batch(4)
    )
    assert [module.training for module in model.modules()] == was
    assert saved.n_rows == (40 + 32 + 9 + 5 if hashed else (20 + 9 + 5 if stored == "touched" else 100 + 9 + 5))
    opened = gba_hvd.load_for_inference(tmp_path / "m", tables=tables)
    assert torch.equal(opened(one), evaluated(model, one))
    assert not opened.training
    assert not opened(one).requires_grad
    assert not opened.tables.captured  # nothing is kept for a backward pass


@pytest.mark.processes
def test_a_model_opens_where_horovod_cannot_be_imported(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(30)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(4))
    torch.save(evaluated(model, one), tmp_path / "expected")
    np.savez(tmp_path / "ids.npz", **{k: v for k, v in one.ids.items() if k != "history"}, dense=one.dense,
             values=one.ids["history"].values, offsets=one.ids["history"].offsets)  # fmt: skip
    code = (
        BLOCKED
        + """
import numpy as np
model = gba_hvd.load_for_inference("m")
a = {k: torch.from_numpy(v) for k, v in np.load("ids.npz").items()}
ids = {"user": a["user"], "item": a["item"], "history": gba_hvd.Bag(a["values"], a["offsets"])}
assert torch.equal(model(gba_hvd.Batch(ids, a["dense"], torch.zeros(30))), torch.load("expected", weights_only=True))
assert not [name for name in sys.modules if name.split(".")[0] in ("horovod", "mlflow", "zmq")], "imported"
print("equal")
"""
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("equal\n", "")


def steps_after_each_pass(model: nn.Module) -> None:
    """As if other workers trained: a step changes rows whenever the model has predicted."""

    def step(*_: Any) -> None:
        memory: Any = model.tables.memory
        shards, number = np.array(memory.ready()), memory.step_span()[1] + 1
        memory.begin(shards, number)
        change_rows(model, "user", np.arange(50), seed=number)
        memory.finish(shards, number)

    model.register_forward_hook(step)


def test_rows_that_others_train_meanwhile_are_not_taken_for_another_model(trained: Trained, tmp_path: Path) -> None:
    model = trained()
    steps_after_each_pass(model)
    with pytest.raises(BadInput, match=r"trained from step 0 to 1 while what .* builds was compared.* two epochs"):
        gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(4))
    assert not (tmp_path / "m").exists()


def test_rows_of_a_step_that_is_in_flight_all_the_while_are_not_taken_for_another_model(
    trained: Trained, tmp_path: Path
) -> None:
    model = trained()
    memory: Any = model.tables.memory
    memory.begin(np.array(memory.ready()), 1)
    seeds = iter(range(9))
    model.register_forward_hook(lambda *_: change_rows(model, "user", np.arange(50), seed=next(seeds)))
    with pytest.raises(BadInput, match=r"trained from step 0 to 1 while what .* builds was compared"):
        gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(4))


def test_rows_are_compared_and_read_while_others_wait(trained: Trained, tmp_path: Path) -> None:
    model, looks = trained(), []

    @contextlib.contextmanager
    def while_saved() -> Iterator[None]:
        looks.append("begin")
        yield
        looks.append("end")

    model.tables.while_saved, rows = while_saved, model.tables.rows
    model.tables.rows = lambda *of: looks.append("rows") or rows(*of)
    model.register_forward_hook(lambda *_: looks.append("predicts"))
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=batch(4))
    assert looks[0] == "begin" and looks[-1] == "end" and {"rows", "predicts"} <= set(looks)


class Converted(nn.Module):
    """nn.Embedding modules; two share a weight, one has a padding row that is not zero, one stays as it is."""

    def __init__(self, rows: int = 30) -> None:
        super().__init__()
        self.item, self.shown = nn.Embedding(rows, 4, padding_idx=0), nn.Embedding(rows, 4, padding_idx=0)
        self.shown.weight = self.item.weight
        self.bag, self.kept = nn.EmbeddingBag(7, 3, mode="max"), nn.Embedding(5, 2)
        self.out = nn.Linear(4 + 4 + 3 + 2, 1)

    def forward(self, item: torch.Tensor, x: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = [self.item(item), self.shown(x["shown"]).mean(1), self.bag(x["bag"]), self.kept(x["kept"])]
        return self.out(torch.cat(rows, dim=1))


def converted_batch(n: int, seed: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    g = torch.Generator().manual_seed(seed)
    draw = lambda high, *shape: torch.randint(0, high, shape, generator=g)  # noqa: E731
    return draw(30, n), {"shown": draw(30, n, 3), "bag": draw(7, n, 2), "kept": draw(5, n)}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_converted_model_is_converted_again(job_memory: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    model = Converted()
    nn.init.normal_(model.item.weight)
    model.to(dtype)
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), keep=["kept"], prefix="tower"))
    gba_hvd.save_model(model, tmp_path / "m", input_example=converted_batch(3))
    opened, x = gba_hvd.load_for_inference(tmp_path / "m"), converted_batch(20)
    with torch.no_grad():
        expected = model(*x)
    assert torch.equal(opened(*x), expected)
    assert opened(*x).dtype == dtype
    scores = gba_hvd.open_model(tmp_path / "m").predict(
        {"item": x[0].numpy(), **{k: v.tolist() for k, v in x[1].items()}}
    )
    assert np.array_equal(scores["score"], expected[:, 0].float().numpy())


class OfBags(nn.Module):
    """Bags as `nn.EmbeddingBag` takes them, one with weights, and a dense feature."""

    def __init__(self) -> None:
        super().__init__()
        self.tags, self.words = nn.EmbeddingBag(9, 4, mode="sum", padding_idx=0), nn.EmbeddingBag(7, 4, mode="mean")

    def forward(self, x: dict[str, Any]) -> torch.Tensor:
        tags, words = x["tags"], x["words"]
        pooled = self.tags(tags.values, tags.offsets, per_sample_weights=tags.weights)
        return (pooled * self.words(words.values, words.offsets)).sum(1) + x["price"]


def test_bags_with_weights_are_requests(job_memory: Any, tmp_path: Path) -> None:
    model = OfBags()
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1)))
    tags = gba_hvd.Bag(torch.tensor([1, 2, 5]), torch.tensor([0, 2, 2]), torch.tensor([0.5, 2.0, -1.0]))
    words = gba_hvd.Bag(torch.tensor([3, 3, 1, 6]), torch.tensor([0, 1, 3]))
    x = {"tags": tags, "words": words, "price": torch.ones(3)}
    gba_hvd.save_model(model, tmp_path / "m", input_example=x)
    assert json.loads((tmp_path / "m" / "versions" / "000001.json").read_bytes())["format"] == 5
    opened, expected = gba_hvd.open_model(tmp_path / "m"), evaluated(model, x).numpy()
    request: dict[str, Any] = {"tags": [[1, 2], [], [5]], "words": [[3], [3, 1], [6]], "price": [1, 1, 1]}
    request["tags_weights"] = [[0.5, 2], [], [-1]]
    assert opened.example is not None and {*opened.example} == {*request}
    for columns in (opened.example, request):
        assert np.array_equal(opened.predict(columns, batch=3)["score"], expected)
    assert np.allclose(opened.predict(request, batch=1)["score"], expected, atol=1e-6)


def test_bags_of_a_converted_model_come_on_its_device(job_memory: Any, tmp_path: Path) -> None:
    """As its other ids, since its modules return rows where the ids are."""
    model, bag = OfBags(), gba_hvd.Bag(torch.tensor([1, 2]), torch.tensor([0, 1]), torch.ones(2))
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1)))
    gba_hvd.save_model(model, tmp_path / "m", input_example={"tags": bag, "words": bag, "price": torch.ones(2)})
    opened, seen = gba_hvd.open_model(tmp_path / "m"), list[gba_hvd.Bag]()

    class Notes(nn.Module):
        def forward(self, x: dict[str, Any]) -> torch.Tensor:
            seen.append(x["tags"])
            return torch.zeros(2)

    elsewhere = OpenModel(Notes(), opened.manifest, None, torch.device("meta"))
    assert opened.example is not None
    elsewhere.predict(opened.example)
    assert {part.device.type for part in vars(seen[0]).values()} == {"meta"}


def test_weights_of_a_bag_of_a_batch_are_a_column(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(5)
    history: Any = one.ids["history"]
    weights = torch.rand(len(history.values), generator=torch.Generator().manual_seed(1))
    one = replace(one, ids={**one.ids, "history": replace(history, weights=weights)})
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=one)
    opened = gba_hvd.open_model(tmp_path / "m")
    assert opened.example is not None and "history_weights" in opened.example
    assert np.array_equal(opened.predict(opened.example)["score"], evaluated(model, one).numpy())
    with pytest.raises(BadInput, match="dense_program: 'history' is a Bag with weights"):
        gba_hvd.save_model(model, tmp_path / "m", build=CODE, input_example=one, dense_program=True)


def test_a_model_that_is_logged_needs_an_example_that_is_a_request(trained: Trained) -> None:
    for more in (torch.ones(4), torch.ones(1)):  # MLflow's signature is of the example
        log = gba_hvd.LogModel(name="m", input_example={"x": torch.ones(3), "more": more}, build=CODE)
        with pytest.raises(BadInput, match=f"got {{'x': 3, 'more': {len(more)}}}"):
            log.check(trained())


def converting(to: torch.dtype = torch.float32) -> nn.Module:
    """A builder that converts; each call makes other rows of padding, of the tables too."""
    model = Converted()
    nn.init.normal_(model.item.weight)
    gba_hvd.convert(model.to(to), gba_hvd.SGD(lr=0.1), prefix="tower")
    return model


def test_rows_of_padding_are_those_of_the_model_where_the_builder_converts(job_memory: Any, tmp_path: Path) -> None:
    model, x = converting(), converted_batch(20)
    job_memory(model.item.tables)
    gba_hvd.save_model(model, tmp_path / "m", build=f"{__name__}:converting")
    opened = gba_hvd.load_for_inference(tmp_path / "m")
    padding = torch.zeros(1, dtype=torch.int64)
    assert torch.equal(opened.item(padding), model.item(padding))
    with torch.no_grad():
        assert torch.equal(opened(*x), model(*x))


class Mixed(nn.Module):
    """A part in bfloat16, which looked-up rows are turned into, and the rest in float32."""

    def __init__(self, tables_too: bool) -> None:
        super().__init__()
        self.tables, self.norm, self.out = model_code.tables(), nn.BatchNorm1d(4), nn.Linear(4, 1)
        if tables_too:
            self.to(torch.bfloat16)
            self.norm.float()

    def forward(self, user: torch.Tensor) -> torch.Tensor:
        rows = self.tables({"user": user})["user"]
        return self.out(self.norm(rows.float()).to(self.out.weight.dtype))


def mixed() -> nn.Module:
    return Mixed(tables_too=False)


@pytest.mark.parametrize("dtypes", ["float32 tables", "bfloat16 tables", "all but the tables in bfloat16"])
def test_each_part_computes_in_its_own_dtype(job_memory: Any, tmp_path: Path, dtypes: str) -> None:
    model, users = Mixed(dtypes == "bfloat16 tables"), torch.arange(20)
    model.out.to(torch.bfloat16)
    if dtypes.startswith("all"):
        model.norm = nn.Identity()
    job_memory(model.tables)
    build = f"{__name__}:{'mixed_without_norm' if dtypes.startswith('all') else 'mixed'}"
    gba_hvd.save_model(model, tmp_path / "m", build=build)
    opened = gba_hvd.load_for_inference(tmp_path / "m")
    state = opened.state_dict()
    assert {name: one.dtype for name, one in state.items()} == {n: one.dtype for n, one in model.state_dict().items()}
    assert opened.tables({"user": users})["user"].dtype == model.tables({"user": users})["user"].dtype
    assert torch.equal(opened(users), evaluated(model, users))


def mixed_without_norm() -> nn.Module:
    model = mixed()
    model.norm = nn.Identity()
    return model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_is_compared_on_its_example(job_memory: Any, tmp_path: Path) -> None:
    model, (item, more) = Converted(), converted_batch(3)
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1), keep=["kept"]))
    model.to("cuda")
    example = (item.to("cuda"), {name: one.to("cuda") for name, one in more.items()})
    assert gba_hvd.save_model(model, tmp_path / "m", input_example=example).version == 1


# --- versions --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_version_writes_the_shards_that_have_changed(trained: Trained, tmp_path: Path) -> None:
    model, url = trained(users=100_000), tmp_path / "m"
    first = gba_hvd.save_model(model, url, build=CODE, arguments={"users": 100_000})
    before = objects(url)
    change_rows(model, "user", np.arange(40_500, 41_500))  # 1 %
    second = gba_hvd.save_model(model, url, build=CODE, arguments={"users": 100_000})
    assert (first.version, second.version) == (1, 2)
    assert 0 < second.new_bytes < 0.05 * first.new_bytes
    assert sum(objects(url).values()) - sum(before.values()) < 0.05 * sum(before.values())
    third = gba_hvd.save_model(model, url, build=CODE, arguments={"users": 100_000})
    assert (third.new_shards, third.new_bytes) == (0, 0)
    one = batch(30, 100_000)
    assert torch.equal(gba_hvd.load_for_inference(url)(one), evaluated(model, one))


@pytest.mark.slow
def test_an_object_store_does_as_a_folder_does(trained: Trained) -> None:
    model, one, url = trained(), batch(20), f"memory://{uuid.uuid4().hex}"
    first = gba_hvd.save_model(model, url, build=CODE, input_example=batch(2))
    change_rows(model, "item", np.arange(9), seed=9)
    second = gba_hvd.save_model(model, url, build=CODE, input_example=batch(2))
    assert (first.version, second.version, second.new_shards) == (1, 2, 1)
    assert torch.equal(gba_hvd.load_for_inference(url)(one), evaluated(model, one))


@pytest.mark.slow
def test_a_shard_that_was_cut_off_is_written_again(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    path = tmp_path / "m" / read_manifest(open_store(tmp_path / "m")).tables[0].rows.shards[0].name
    path.write_bytes(path.read_bytes()[:-4])
    assert gba_hvd.save_model(model, tmp_path / "m", build=CODE).new_shards == 1
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))


def test_rows_of_a_table_with_rows_of_its_own_to_begin_with_are_all_stored(job_memory: Any, tmp_path: Path) -> None:
    model = model_code.make_model()
    model.tables.assign("word", np.arange(5), np.ones((5, 3), np.float32))
    job_memory(model.tables)
    saved = gba_hvd.save_model(model, tmp_path / "m", build=CODE, tables="touched", input_example=batch(2))
    assert saved.n_rows == 5 + 1  # and the padding row of the items, which is zeros
    opened = gba_hvd.load_for_inference(tmp_path / "m")
    for name, n in (("user", 50), ("item", 9), ("word", 5)):
        assert np.array_equal(opened.tables.rows(name, np.arange(n)), model.tables.rows(name, np.arange(n)))


@pytest.mark.parametrize("part", ["rows", "files"])
def test_what_was_altered_in_a_folder_is_written_again(trained: Trained, tmp_path: Path, part: str) -> None:
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    manifest = read_manifest(open_store(tmp_path / "m"))
    path = tmp_path / "m" / (manifest.tables[0].rows.shards[0].name if part == "rows" else manifest.dense.name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert gba_hvd.save_model(model, tmp_path / "m", build=CODE).new_shards == (part == "rows")
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))


@pytest.mark.slow
def test_a_file_that_was_cut_off_is_written_again(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    path = tmp_path / "m" / read_manifest(open_store(tmp_path / "m")).dense.name
    path.write_bytes(path.read_bytes()[:-4])
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1, 500])
def test_a_manifest_that_a_store_has_in_part_is_passed_over(trained: Trained, tmp_path: Path, left: int) -> None:
    """A folder never has one; a store without atomic writes keeps what an interrupted save has written."""
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    whole = (tmp_path / "m" / "versions" / "000001.json").read_bytes()
    (tmp_path / "m" / "versions" / "000002.json").write_bytes(whole[:left])
    with pytest.warns(UserWarning, match="000002.json was not written to its end"):
        assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))
    with pytest.raises(Damaged, match="cut off"):
        gba_hvd.load_for_inference(tmp_path / "m", version=2)
    assert gba_hvd.save_model(model, tmp_path / "m", build=CODE).version == 3
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))


@pytest.mark.slow
def test_an_old_version_stays_what_it_was(trained: Trained, tmp_path: Path) -> None:
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    expected = evaluated(model, one)
    change_rows(model, "user", np.arange(50), seed=9)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m", version=1)(one), expected)
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))
    with pytest.raises(BadInput, match="has no version 3; it has 1, 2"):
        gba_hvd.load_for_inference(tmp_path / "m", version=3)


@pytest.mark.slow
def test_a_vocabulary_that_grows_keeps_its_shards(trained: Trained, tmp_path: Path) -> None:
    arguments = {"users": 3200, "hashed": True}
    model = trained(**arguments)
    change_rows(model, "user", np.arange(2000))
    how = {"build": CODE, "arguments": arguments, "shard_bytes": 4096}
    first = gba_hvd.save_model(model, tmp_path / "m", **how)
    change_rows(model, "user", np.array([123456]))
    second = gba_hvd.save_model(model, tmp_path / "m", **how)
    assert first.new_shards > 8
    assert second.new_shards == 1


@pytest.mark.slow
@pytest.mark.parametrize("dies_at", range(1, 7))  # three shards, the dense part, the claim of a number, the manifest
def test_a_save_that_dies_leaves_the_version_before(
    trained: Trained, tmp_path: Path, dies_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    expected = evaluated(model, one)
    change_rows(model, "user", np.arange(50), seed=9)
    change_rows(model, "item", np.arange(9), seed=9)
    change_rows(model, "word", np.arange(5), seed=9)
    model.mlp[0].weight.data += 1
    faulty = FaultyStore(open_store(tmp_path / "m")).dies_before("put", dies_at)
    monkeypatch.setattr("gba_hvd.serving.save.open_store", lambda url: faulty)
    with pytest.raises(Crash):
        gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    assert faulty.fired == faulty.planned
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), expected)
    monkeypatch.undo()
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))


class Meanwhile:
    """A store in which something else happens before its nth call of `names`, after which the call does its work."""

    def __init__(self, store: Any, nth: int, do: Callable[[], object]) -> None:
        self.store, self.url, self.left, self.do = store, store.url, nth, do

    def names(self, prefix: str) -> Any:
        found = self.store.names(prefix)
        self.left -= prefix.startswith("versions/")
        if not self.left and self.do:
            do, self.do = self.do, None
            do()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("nth", [1, 2])  # the other saves after the versions were listed, after the claims were
def test_two_that_save_at_the_same_time_never_have_one_version(
    trained: Trained, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, one, outcomes = f"memory://{uuid.uuid4().hex}", batch(), []
    mine, other = trained(), trained()
    mine.mlp[0].weight.data += 1

    def save_other() -> None:
        monkeypatch.undo()
        try:
            outcomes.append((other, gba_hvd.save_model(other, url, build=CODE).version))
        except StoreError:
            outcomes.append((other, None))

    store = Meanwhile(open_store(url), nth, save_other)
    monkeypatch.setattr("gba_hvd.serving.save.open_store", lambda url: store)
    with contextlib.suppress(StoreError):
        outcomes.append((mine, gba_hvd.save_model(mine, url, build=CODE).version))
    saved = {number: model for model, number in outcomes if number}
    assert len(saved) == len([number for _, number in outcomes if number]) > 0
    for number, model in saved.items():
        assert torch.equal(gba_hvd.load_for_inference(url, version=number)(one), evaluated(model, one))
    assert not [name for name in open_store(url).names("versions/") if not name.endswith(".json")]


def test_a_full_disk_leaves_the_version_before(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, one = trained(), batch(20)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    expected = evaluated(model, one)
    change_rows(model, "user", np.arange(50), seed=9)
    full = FaultyStore(open_store(tmp_path / "m")).fails("put", 1, StoreError("the disk is full: free space"))
    monkeypatch.setattr("gba_hvd.serving.save.open_store", lambda url: full)
    with pytest.raises(StoreError, match="the disk is full"):
        gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    assert full.fired == full.planned
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), expected)


# --- what does not fit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"build": "make_model"}, "expected 'package.module:callable', or 'file.py:callable'"),
        ({"build": "nowhere.py:make"}, "nowhere.py cannot be read"),
        ({"build": "no_such_package:make"}, "which needs no_such_package, and that is not installed here"),
        ({"build": "tests.unit.serving.model_code:nothing"}, "there is no callable 'nothing'"),
        ({"build": "builtins:dict"}, "returned a dict, expected an nn.Module"),
        ({"build": CODE, "arguments": {"users": 51}}, "table 'user' is 51 x 4 in the built module, and 50 x 4"),
        ({"build": CODE, "arguments": {"width": 7}}, r"mlp.3.weight is \[1, 6\] in the saved model, and \[1, 7\]"),
        ({"build": CODE, "arguments": {"users": (1,)}}, "arguments must be plain JSON"),
        ({"build": CODE.replace("make_model", "forgetful")}, "differs from the model's on input_example"),
        ({"build": CODE, "tables": "some"}, "tables 'some' is not known"),
        ({"build": CODE, "activation": "softmax"}, "activation 'softmax' is not known"),
        ({"build": CODE, "shard_bytes": 1}, "shard_bytes must be at least 4096"),
        ({"build": CODE, "input_example": [1]}, "batch is a list"),
        ({"build": CODE, "input_example": {"a": torch.arange(3), "a_off": torch.arange(2)}}, "{'a': 3, 'a_off': 2}"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(
    trained: Trained, tmp_path: Path, how: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadInput, match=words):
        gba_hvd.save_model(trained(), tmp_path / "m", **{"input_example": batch(4), **how})
    assert not (tmp_path / "m" / "versions").exists()


def test_a_class_that_nothing_can_import_needs_a_builder(job_memory: Any, tmp_path: Path) -> None:
    class Local(Converted):
        pass

    model = Local()
    job_memory(gba_hvd.convert(model, gba_hvd.SGD(lr=0.1)))
    with pytest.raises(BadInput, match="so nothing can build the model elsewhere: build="):
        gba_hvd.save_model(model, tmp_path / "m")


def test_a_model_without_tables_or_rows(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no EmbeddingTables among its modules"):
        gba_hvd.save_model(nn.Linear(2, 2), tmp_path)
    model = Converted()
    gba_hvd.convert(model, gba_hvd.SGD(lr=0.1))
    with pytest.raises(BadInput, match="the tables have no rows yet"):
        gba_hvd.save_model(model, tmp_path)


def test_rows_of_other_hosts_are_not_here(trained: Trained, tmp_path: Path) -> None:
    model = trained()
    model.tables.memory.set_absent(0)
    with pytest.raises(BadInput, match="15 of the 16 shards of the tables, the others are on other hosts"):
        gba_hvd.save_model(model, tmp_path, build=CODE)


@pytest.mark.parametrize("tables", ["memory", "mmap", "remote"])
def test_a_hashed_table_that_has_admitted_no_id(job_memory: Any, tmp_path: Path, tables: str) -> None:
    arguments = {"users": 100, "hashed": True}
    model, one = model_code.make_model(**arguments), batch()
    job_memory(model.tables)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, arguments=arguments)
    opened = gba_hvd.load_for_inference(tmp_path / "m", tables=tables)
    assert torch.equal(opened.tables(one.ids)["user"], model.tables(one.ids)["user"])
    assert not len(opened.tables.vocabulary("user"))


def test_mapped_shards_keep_no_file_open(trained: Trained, tmp_path: Path) -> None:
    model = trained(users=5000)
    how = {"build": CODE, "arguments": {"users": 5000}, "shard_bytes": 4096}
    assert gba_hvd.save_model(model, tmp_path / "m", **how).new_shards > 16
    opened = gba_hvd.load_for_inference(tmp_path / "m", tables="mmap")
    before = len(os.listdir("/proc/self/fd"))
    ids = np.arange(5000)
    assert np.array_equal(opened.tables.rows("user", ids), model.tables.rows("user", ids))
    assert len(os.listdir("/proc/self/fd")) < before + 4


def test_a_shard_that_cannot_be_mapped_is_not_damaged(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    opened = gba_hvd.load_for_inference(tmp_path / "m", tables="mmap")
    spare = os.open("/dev/null", os.O_RDONLY)
    os.close(spare)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, limits[1]))  # no further file can be opened
    try:
        with pytest.raises(StoreError, match=r"cannot be mapped: .*Too many open files") as found:
            opened(batch())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(found.value, Damaged)
    opened(batch())


def test_a_single_value_is_no_column_and_columns_that_are_not_needed_may_be_anything(
    trained: Trained, tmp_path: Path
) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, input_example=batch(3))
    opened = gba_hvd.open_model(tmp_path / "m")
    request = dict(opened.example or {})
    expected = opened.predict(request)["score"]
    more = {"name": "a model", "n": 7, "long": list(range(99)), "np": np.array(1.0)}
    assert np.array_equal(opened.predict(request | more, batch=2)["score"], expected)
    for value in (7, np.array(7)):
        with pytest.raises(BadInput, match="field 'user': expected a column of int64, got the single value"):
            opened.predict(request | {"user": value})


# --- what was saved is not what is there -----------------------------------------------------------------------------


def test_another_format_version(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("gba_hvd.serving.manifest._format_of", lambda manifest: 6)
        gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    with pytest.raises(BadInput, match="is in format 6, and this program reads formats up to 5: install"):
        gba_hvd.load_for_inference(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["memory", "mmap"])
@pytest.mark.parametrize("how", ["truncated", "longer", "gone"])
def test_a_shard_that_is_not_what_was_saved(trained: Trained, tmp_path: Path, tables: str, how: str) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    path = tmp_path / "m" / read_manifest(open_store(tmp_path / "m")).tables[0].rows.shards[0].name
    if how == "gone":
        path.unlink()
    else:
        data = path.read_bytes()
        path.write_bytes(data[:-4] if how == "truncated" else data + b"more")
    words = "is gone" if how == "gone" else "truncated or overwritten"
    with pytest.raises(Damaged, match=words):
        gba_hvd.load_for_inference(tmp_path / "m", tables=tables)(batch())


@pytest.mark.parametrize("part", ["rows", "files"])
def test_a_flipped_bit_is_found(trained: Trained, tmp_path: Path, part: str) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    manifest = read_manifest(open_store(tmp_path / "m"))
    path = tmp_path / "m" / (manifest.tables[0].rows.shards[0].name if part == "rows" else manifest.dense.name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(Damaged, match="is not what was saved: its SHA-256 is"):
        gba_hvd.load_for_inference(tmp_path / "m")


@pytest.mark.parametrize("change", ["cut", "edited"])
def test_a_manifest_that_was_changed(trained: Trained, tmp_path: Path, change: str) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    path = tmp_path / "m" / "versions" / "000001.json"
    text = path.read_text()
    path.write_text(text[:-10] if change == "cut" else text.replace('"activation":"none"', '"activation":"other"'))
    with pytest.raises(Damaged, match="cut off" if change == "cut" else "altered"):
        gba_hvd.load_for_inference(tmp_path / "m")


def test_a_table_that_is_missing(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    path = tmp_path / "m" / "versions" / "000001.json"
    manifest = from_json(path.read_bytes(), "versions/000001.json")
    path.write_bytes(to_json(type(manifest)(**{**vars(manifest), "tables": manifest.tables[1:]})))
    with pytest.raises(BadInput, match="table 'user' is missing in the saved model, which has item, word"):
        gba_hvd.load_for_inference(tmp_path / "m")


@pytest.mark.slow
@pytest.mark.parametrize("url", ["http://127.0.0.1:9/m", "https://no-such-host.invalid/m"])
def test_a_server_that_is_not_there_is_not_taken_for_one_without_models(url: str) -> None:
    with pytest.raises(StoreError, match=r"/m: versions/ cannot be listed: Cannot connect to host"):
        gba_hvd.load_for_inference(url, tables="remote", tries=1)


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="has no model"):
        gba_hvd.load_for_inference(tmp_path)
    with pytest.raises(BadInput, match="tables='mmap' needs a local folder"):
        gba_hvd.load_for_inference("memory://somewhere", tables="mmap")
    with pytest.raises(BadInput, match="tables 'disk' is not known"):
        gba_hvd.load_for_inference(tmp_path, tables="disk")


def test_an_id_out_of_range_and_slots(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE)
    model, one = gba_hvd.load_for_inference(tmp_path / "m"), batch()
    with pytest.raises(BadInput, match="table 'user' has rows 0 to 49, got id 50 in sample 0 of the batch"):
        model(gba_hvd.Batch({**one.ids, "user": one.ids["user"] + 50 - one.ids["user"][0]}, one.dense, one.label))
    with pytest.raises(BadInput, match="no slots of an optimizer"):
        model.tables.rows("user", [1], "sum")


def test_the_manifest_is_json_with_its_own_checksum(trained: Trained, tmp_path: Path) -> None:
    gba_hvd.save_model(trained(), tmp_path / "m", build=CODE, source={"step": 7})
    document = json.loads((tmp_path / "m" / "versions" / "000001.json").read_text())
    assert document["format"] == 1
    assert document["model"]["source"] == {"step": 7}
    assert set(document["model"]["versions"]) == {"gba-hvd", "torch", "numpy"}


class StackedInOrder(nn.Module):
    """Its weights are for the rows in the order of the batch's ids."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = gba_hvd.EmbeddingTables({"user": (9, 4), "item": (7, 4), "city": (3, 4)}, gba_hvd.SGD(lr=0.1))
        self.out = nn.Linear(12, 1)

    def forward(self, batch: gba_hvd.Batch) -> torch.Tensor:
        return self.out(self.tables.stacked(batch.ids).flatten(1)).squeeze(1)


def test_scores_of_columns_are_those_of_a_batch_where_the_order_of_fields_counts(
    job_memory: Callable[..., None], tmp_path: Path
) -> None:
    model, rng = StackedInOrder(), np.random.default_rng(1)
    job_memory(model.tables)
    ids = {name: torch.from_numpy(rng.integers(0, table.n_rows, 20)) for name, table in model.tables.tables.items()}
    one = gba_hvd.Batch({**ids}, torch.empty(20, 0), torch.zeros(20))
    gba_hvd.save_model(model, tmp_path / "m", input_example=one)
    scores = gba_hvd.open_model(tmp_path / "m").predict({name: column.numpy() for name, column in ids.items()})
    assert np.allclose(scores["score"], evaluated(model, one).numpy(), atol=1e-6)


def test_the_step_of_the_rows_is_stored(trained: Trained, training: Any, clicks: Any, tmp_path: Path) -> None:
    model = trained()
    memory: Any = model.tables.memory
    memory.finish(np.array(memory.ready()), 7)
    gba_hvd.save_model(model, tmp_path / "m", build=CODE, source={"night": 3})
    assert read_manifest(open_store(tmp_path / "m")).source == {"step": 7, "night": 3}
    job = training()
    job.epoch(clicks(40))
    live_rows([job.tables])
    assert step_of_rows([job.tables]) == job.state.step == 3
