"""A checkpoint becomes a model that predicts as the job's did."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving.manifest import read_manifest, versions
from gba_hvd.serving.row_sources import CheckpointRows
from gba_hvd.shm.checkpoint_rows import ShardRows
from recovery.config import Config
from recovery.errors import StoreError
from recovery.restore.open_checkpoint import open_checkpoint
from recovery.selection.selector import Selection
from recovery.state_codec import encode
from recovery.storage.open import open_store
from recovery.write.multipart import SaveTarget, commit_parts, save_part
from tests.recovery.storage.test_stores import small_disk as small_disk
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated, objects
from tests.unit.serving.test_save_and_load import Converted, Trained, converted_batch, raw_users


def checkpoint(
    model: nn.Module, tables: gba_hvd.EmbeddingTables, url: Path, number: int = 1, about: dict[str, Any] | None = None,
    **state_of_job: Any,
) -> None:  # fmt: skip
    """One that a job would make of this model, of step 4 + number."""
    rows, store, config = ShardRows(tables.memory), open_store(url), Config()
    selection = Selection(rows, config)
    target = SaveTarget(1, number, "full", None, 4 + number, 500, rows.schema, about or {})
    state = encode({"model": dict(model.state_dict()), **state_of_job})
    commit_parts(store, selection, target, [save_part(rows, selection, store, target, config)], lambda parts: state)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["all", "touched"])
@pytest.mark.parametrize("hashed", [False, True])
def test_predictions_are_those_of_the_job(trained: Trained, tmp_path: Path, hashed: bool, stored: str) -> None:
    arguments = {"users": 100, "hashed": hashed}
    model = trained(touched=20, **arguments)
    checkpoint(model, model.tables, tmp_path / "c")
    one = raw_users(batch(40), model) if hashed else batch(40, 100)
    saved = gba_hvd.export_model(
        tmp_path / "c", tmp_path / "m", build=CODE, arguments=arguments, tables=stored, input_example=batch(2),
        hashed=["user"] if hashed else [],
    )  # fmt: skip
    assert read_manifest(open_store(tmp_path / "m")).hashed == (("user",) if hashed else ())
    assert saved.n_rows == 9 + 5 + (40 + 32 if hashed else 20 if stored == "touched" else 100)
    assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(one), evaluated(model, one))
    source = read_manifest(open_store(tmp_path / "m")).source
    assert (source["step"], source["checkpoint"]) == (5, "manifests/000001-00000001.json")
    assert source["checkpoint_checksum"] == open_checkpoint(tmp_path / "c").checksum
    # The same rows, saved from memory, are the same shards.
    again = gba_hvd.save_model(model, tmp_path / "m", build=CODE, arguments=arguments, tables=stored)
    assert (again.version, again.new_shards) == (2, 0)


def test_options_are_for_the_store_of_the_model(trained: Trained, tmp_path: Path) -> None:
    """A checkpoint that needs some is opened with its own."""
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    url = f"memory://{uuid.uuid4().hex}"
    assert gba_hvd.export_model(tmp_path / "c", url, build=CODE, asynchronous=False).version == 1


@pytest.mark.slow
@pytest.mark.parametrize("hashed", [False, True])
def test_large_tables_are_read_in_parts_of_which_each_is_read_once(
    trained: Trained, tmp_path: Path, hashed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"users": 3000, "hashed": hashed}
    model = trained(**arguments)
    if hashed:
        change_rows(model, "user", np.arange(2500))
    how = {"build": CODE, "arguments": arguments, "shard_bytes": 4096}
    whole = gba_hvd.save_model(model, tmp_path / "m", **how)
    checkpoint(model, model.tables, tmp_path / "c")
    reads = []
    read = CheckpointRows.of_keys if hashed else CheckpointRows.numbered

    def counted(self: CheckpointRows, *args: Any) -> np.ndarray:
        reads.append(self.name)
        return read(self, *args)

    monkeypatch.setattr(CheckpointRows, "of_keys" if hashed else "numbered", counted)
    monkeypatch.setattr("gba_hvd.serving.row_shards._BLOCK_BYTES", 16 << 10)
    again = gba_hvd.export_model(tmp_path / "c", tmp_path / "m", **how)
    assert whole.new_shards > 10
    assert again.new_shards == 0
    assert 1 < reads.count("user") <= 5


@pytest.mark.slow
def test_a_converted_model(job_memory: Callable[..., None], tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Converted()
    nn.init.normal_(model.item.weight)  # rows of padding that no builder makes
    tables = gba_hvd.convert(model, gba_hvd.SGD(lr=0.1))
    job_memory(tables)
    checkpoint(model, tables, tmp_path / "c")
    build = f"{Converted.__module__}:{Converted.__qualname__}"
    gba_hvd.export_model(tmp_path / "c", tmp_path / "m", build=build)
    x = converted_batch(20)
    with torch.no_grad():
        assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m")(*x), model(*x))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"arguments": {"users": 51}}, "table 'user' is 51 x 4 in the built module, and 50 x 4 in the saved model"),
        (
            {"build": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 1}},
            "bias: the saved model has no such tensor",
        ),
        ({"step": 6}, "no whole checkpoint of step 6: it has steps 5"),
    ],
)
def test_what_does_not_fit_is_refused(trained: Trained, tmp_path: Path, how: dict[str, Any], words: str) -> None:
    model = trained()
    checkpoint(model, model.tables, tmp_path / "c")
    with pytest.raises(BadInput, match=words):
        gba_hvd.export_model(tmp_path / "c", tmp_path / "m", **{"build": CODE, **how})
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["save", "export"])
def test_a_disk_that_is_full_in_the_middle_leaves_the_version_before(
    trained: Trained, small_disk: Path, tmp_path: Path, how: str
) -> None:
    """A real one, of 1 MiB: the first shards still find room."""
    arguments, one = {"users": 10_000}, batch(30, 10_000)
    model, url = trained(**arguments), small_disk / "m"

    def write() -> int:
        if how == "save":
            return gba_hvd.save_model(model, url, build=CODE, arguments=arguments).version
        checkpoint(model, model.tables, tmp_path / f"c{len(list(tmp_path.iterdir()))}")
        newest = max(tmp_path.glob("c*"), key=lambda path: int(path.name[1:]))
        return gba_hvd.export_model(newest, url, build=CODE, arguments=arguments).version

    assert write() == 1
    expected, before = evaluated(model, one), objects(url)
    change_rows(model, "user", np.arange(10_000), seed=9)
    (small_disk / "filler").write_bytes(b"x" * (shutil.disk_usage(small_disk).free - 80_000))
    with pytest.raises(StoreError, match="the disk is full: free space"):
        write()
    written = objects(url).keys() - before.keys()
    assert written and all(name.startswith("rows/") for name in written)
    assert torch.equal(gba_hvd.load_for_inference(url)(one), expected)
    (small_disk / "filler").unlink()
    assert write() == 2
    assert torch.equal(gba_hvd.load_for_inference(url)(one), evaluated(model, one))
    assert torch.equal(gba_hvd.load_for_inference(url, version=1)(one), expected)


EXPORTS = """
import sys, gba_hvd
from recovery.errors import StoreError
url, checkpoint, build, n = *sys.argv[1:4], int(sys.argv[4])
sys.stdin.readline()
while n:
    try:
        print(gba_hvd.export_model(checkpoint, url, build=build).version, flush=True)
        n -= 1
    except StoreError as error:
        assert "another process saves version" in str(error), error
"""


@pytest.mark.processes
def test_two_processes_that_export_to_one_place_never_share_a_version(trained: Trained, tmp_path: Path) -> None:
    one, models, exporters = batch(30), [trained(), trained()], []
    for number, model in enumerate(models):
        change_rows(model, "user", np.arange(50), seed=20 + number)
        checkpoint(model, model.tables, tmp_path / f"c{number}")
        command = [sys.executable, "-c", EXPORTS, str(tmp_path / "m"), str(tmp_path / f"c{number}"), CODE, "6"]
        exporters.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
    for exporter in exporters:
        assert exporter.stdin is not None
        exporter.stdin.write("now\n")
        exporter.stdin.flush()
    found = []
    for exporter in exporters:
        out, errors = exporter.communicate(timeout=250)
        assert exporter.returncode == 0, errors
        found.append([int(line) for line in out.split()])
    store = open_store(tmp_path / "m")
    assert sorted(found[0] + found[1]) == versions(store)
    assert not [name for name in store.names("versions/") if not name.endswith(".json")]
    for numbers, model in zip(found, models, strict=True):
        expected = evaluated(model, one)
        for version in numbers:
            assert torch.equal(gba_hvd.load_for_inference(tmp_path / "m", version=version)(one), expected)


def test_the_rows_of_a_chain_of_saves_are_the_newest(trained: Trained, tmp_path: Path) -> None:
    """Partial saves: rows are those that a restore would bring back."""
    model = trained()
    rows, store, config = ShardRows(model.tables.memory), open_store(tmp_path / "c"), Config(policy="delta")
    selection, parent = Selection(rows, config), None
    state = encode({"model": dict(model.state_dict())})
    for number in (1, 2):
        kind = "delta" if parent else "full"
        target = SaveTarget(1, number, kind, parent, number, number, rows.schema)
        commit_parts(store, selection, target, [save_part(rows, selection, store, target, config)], lambda _: state)
        parent = target.manifest_name
        change_rows(model, "user", np.arange(10), seed=number)
        memory, group = model.tables.memory, model.tables.layout.groups[0]
        memory.count_changed(memory.record_starts(np.arange(10), group), group)
    opened = open_checkpoint(tmp_path / "c")
    change_rows(model, "user", np.arange(10), seed=1)
    assert np.array_equal(opened.rows("user"), model.tables.rows("user", np.arange(50)))
