"""`gba-hvd checkpoint` says what is in a place, finds every damage, and takes checkpoints elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.cli import main
from gba_hvd_tools.commands.checkpoint import _chain

from recovery import state_codec
from recovery.checkpointer import Checkpointer
from recovery.config import Config
from recovery.errors import Damaged
from recovery.restore.inspect import read_rows, verify
from recovery.storage.open import open_store
from recovery.testing import Saver, train, two_tables, values
from recovery.torch_rows.tensor_rows import TensorRows

STATE = {
    "model": {"mlp.weight": torch.arange(6.0).reshape(2, 3), "mlp.bias": torch.ones(2)},
    "optimizer": {"state": {0: {"exp_avg": torch.ones(5, dtype=torch.float64), "step": 7}}, "lr": 0.1},
}


class Saved:
    """A folder with a full checkpoint of step 3 and a delta of step 5; the values of each, by step."""

    def __init__(self, folder: Path) -> None:
        self.url, self.values = str(folder), dict[int, dict[str, np.ndarray]]()
        rows = two_tables(n_shards=3, n_rows=700)
        with Checkpointer(self.url, rows, Config(policy="delta", job="job-1")) as checkpoints:
            for steps in (3, 2):
                train(rows, steps, seed=1)
                step = rows.last_step
                self.values[step] = values(rows)
                self.newest = checkpoints.save(step, 100 * step, STATE).result(60).manifest.name
        self.names = sorted(open_store(self.url).names("manifests/"))

    def blob(self, epoch_number: str) -> Path:
        return sorted((Path(self.url) / "blobs" / epoch_number).iterdir())[0]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    return Saved(tmp_path / "place")


def said(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> str:
    assert main(["checkpoint", *args]) == status
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *args: str, status: int = 0) -> Any:
    return json.loads(said(capsys, *args, "--json", status=status))


@pytest.mark.slow
def test_ls_lists_the_newest_first(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    listed = as_json(capsys, "ls", saved.url)["checkpoints"]
    assert [(one["name"], one["kind"], one["step"], one["samples"], one["chain"], one["ok"]) for one in listed] == [
        (saved.names[1], "delta", 5, 500, 2, True),
        (saved.names[0], "full", 3, 300, 1, True),
    ]
    assert 0 < listed[0]["n_bytes"] < listed[1]["n_bytes"]
    text = said(capsys, "ls", saved.url)
    assert "000001-00000002" in text and "delta" in text and "DAMAGED" not in text


@pytest.mark.slow
def test_ls_marks_the_checkpoint_of_the_best_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = Saver(two_tables(n_shards=3, n_rows=700), open_store(tmp_path), Config(policy="full"))
    for seed in range(3):
        train(saver.rows, 2, seed=seed)
        saver.save(about={"best_step": 3, "best_metric": "valid_auc", "best_value": 0.75})
    lines = said(capsys, "ls", str(tmp_path)).splitlines()
    assert [line.split("ok")[1].strip() for line in lines if " ok" in line] == [
        "", ", the best model: valid_auc 0.7500 of step 3 (rows up to 1 step ahead of the measured model)", ""
    ]  # fmt: skip
    listed = as_json(capsys, "ls", str(tmp_path))["checkpoints"]
    assert [(one["step"], one.get("best_metric"), one.get("best_value")) for one in listed] == [
        (6, None, None), (4, "valid_auc", 0.75), (2, None, None)
    ]  # fmt: skip


@pytest.mark.slow
def test_ls_names_a_best_model_that_no_checkpoint_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = Saver(two_tables(n_shards=3, n_rows=700), open_store(tmp_path), Config(policy="full"))
    train(saver.rows, 2, seed=1)
    missed = {"best_unsaved_step": 1, "best_unsaved_value": 0.8, "best_unsaved_why": "no server", "best_metric": "auc"}
    saver.save(about=missed)
    words = "the best model, auc 0.8000 of step 1, was not saved: no server"
    text = said(capsys, "ls", str(tmp_path))
    assert text.splitlines()[-1] == words and ", the best model" not in text.removesuffix(f"{words}\n")
    train(saver.rows, 2, seed=2)
    saver.save(about={"best_step": 4, "best_value": 0.7, **missed})
    text = said(capsys, "ls", str(tmp_path))
    assert ", the best model that is saved: auc 0.7000 of step 4 " in text and text.splitlines()[-1] == words
    unsaved = as_json(capsys, "ls", str(tmp_path))["best_unsaved"]
    assert unsaved == {"step": 1, "metric": "auc", "value": 0.8, "why": "no server"}


@pytest.mark.slow
def test_ls_and_show_give_the_position_in_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saver = Saver(two_tables(n_shards=3, n_rows=700), open_store(tmp_path), Config(policy="full"))
    for about in ({}, {"epoch": 4, "steps_done": 40, "n_steps": 40}, {"epoch": 5, "steps_done": 15, "n_steps": 40}):
        train(saver.rows, 2, seed=1)
        saver.save(about={"position": about} if about else {})
    lines = [line for line in said(capsys, "ls", str(tmp_path)).splitlines() if " ok" in line]
    assert [re.split(r" {2,}", line)[3] for line in lines] == ["epoch 5, 15 of 40 steps", "epoch 4, complete", "-"]
    listed = as_json(capsys, "ls", str(tmp_path))["checkpoints"]
    assert [one["position"] and (one["position"]["epoch"], one["position"]["complete"]) for one in listed] == [
        (5, False), (4, True), None
    ]  # fmt: skip
    assert "position  epoch 5, 15 of 40 steps\n" in said(capsys, "show", str(tmp_path))


def test_ls_of_an_empty_place_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no checkpoints" in said(capsys, "ls", str(tmp_path))
    assert main(["checkpoint", "show", str(tmp_path)]) == 1
    assert "has no checkpoints" in capsys.readouterr().err


@pytest.mark.slow
def test_a_local_folder_that_does_not_exist_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for url in (str(tmp_path / "typo"), f"file://{tmp_path}/typo", str(tmp_path / "file")):
        for command in ("ls", "show", "verify", "gc"):
            assert main(["checkpoint", command, url]) == 1
            said = capsys.readouterr()
            assert f"there is no folder {url.removeprefix('file://')}: is it written as" in said.err and not said.out


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("", "the URL is empty: expected a folder or URL, written as the job's `url` is"),
        ("0dca47bb965f4c42bee2753a4df25500", "Runs and jobs (`gba-hvd report` and `gba-hvd ps` list them)"),
    ],
)
def test_a_run_is_no_place_of_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], url: str, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("ls", "show", "verify", "gc"):
        assert main(["checkpoint", command, url]) == 1
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_show_reports_tables_chain_and_sizes(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    shown = as_json(capsys, "show", saved.url, "000001-00000001")
    assert shown["kind"] == "full" and shown["n_shards"] == 3 and shown["chain"] == [saved.names[0]]
    user, colour = shown["tables"]
    assert (user["name"], user["n_rows"], user["saved"], user["steps"]) == ("user", 700, 700, "3")
    assert user["columns"] == "weight [4], exp_avg [4], sum [1]"
    assert colour["saved"] == 11
    newest = as_json(capsys, "show", saved.url)
    assert newest["name"] == saved.newest and 0 < newest["tables"][0]["saved"] < 700
    assert "user" in said(capsys, "show", saved.url)


def test_a_name_that_is_not_there_suggests_one(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", saved.url, "000001-00000003"]) == 1
    assert "did you mean 000001-00000002?" in capsys.readouterr().err


def test_verify_of_a_good_place_says_that_every_byte_is_good(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    assert "every byte is as it was saved" in said(capsys, "verify", saved.url)
    assert as_json(capsys, "verify", saved.url, "newest")["checked"] == 2


def test_verify_names_each_damaged_part(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    full = saved.blob("000001-00000001")
    data = bytearray(full.read_bytes())
    data[100] ^= 1
    data[-100] ^= 1
    full.write_bytes(data)
    (Path(saved.url) / "blobs/000001-00000002/state").write_bytes(b"short")
    flaws = as_json(capsys, "verify", saved.url, status=1)["flaws"]
    assert flaws.keys() == set(saved.names)
    assert len(flaws[saved.names[0]]) == 2
    assert all("checksum" in flaw and "section at byte" in flaw for flaw in flaws[saved.names[0]])
    assert len(flaws[saved.names[1]]) == 1 and "bytes were saved, 5 are there" in flaws[saved.names[1]][0]
    assert "2 damaged" in said(capsys, "verify", saved.url, status=1)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "longer", "shorter", "manifest", "base"])
def test_verify_finds_what_is_gone_or_of_another_length(
    saved: Saved, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    blob, base = saved.blob("000001-00000002"), Path(saved.url) / saved.names[0]
    if damage == "gone":
        blob.unlink()
    elif damage == "longer":
        blob.write_bytes(blob.read_bytes() + b"x")
    elif damage == "shorter":
        blob.write_bytes(blob.read_bytes()[:-1])
    elif damage == "manifest":
        base.write_bytes(base.read_bytes().replace(b'"step":3', b'"step":4'))
    else:
        base.unlink()
    flaws = as_json(capsys, "verify", saved.url, status=1)["flaws"]
    word = {
        "gone": "is gone",
        "longer": "bytes",
        "shorter": "bytes were saved",
        "manifest": "altered",
        "base": "is gone",
    }
    [(name, found)] = flaws.items()
    assert len(found) == 1 and word[damage] in found[0]
    assert name == (saved.names[0] if damage == "manifest" else saved.names[1])


@pytest.mark.slow
def test_damaged_ones_are_listed_as_such(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    saved.blob("000001-00000002").unlink()
    text = said(capsys, "ls", saved.url)
    assert "DAMAGED" in text and "is gone" in text
    assert as_json(capsys, "show", saved.url)["name"] == saved.names[0]
    assert main(["checkpoint", "show", saved.url, "000001-00000002"]) == 1
    assert "is gone" in capsys.readouterr().err


@pytest.mark.slow
def test_diff_counts_the_changed_rows_and_names_the_largest_change(
    saved: Saved, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = as_json(capsys, "diff", saved.url, "000001-00000001")["tables"]
    for table in tables:
        old, new = (saved.values[step][table["table"]] for step in (3, 5))
        width = 4 if table["table"] == "user" else 2
        by = np.abs(new[:, :width] - old[:, :width]).max(axis=1)
        assert table["changed"] == (old != new).any(axis=1).sum() > 0
        assert (table["largest"], table["largest_row"]) == (pytest.approx(by.max()), by.argmax())
        assert table["only_one"] == 0
    assert "largest change" in said(capsys, "diff", saved.url, *[name[10:-5] for name in saved.names])
    same = as_json(capsys, "diff", saved.url, "newest")["tables"]
    assert all(table["changed"] == 0 and table["largest"] is None for table in same)


@pytest.mark.slow
def test_diff_looks_at_a_large_table_in_parts(
    saved: Saved, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = as_json(capsys, "diff", saved.url, "000001-00000001")
    monkeypatch.setattr("gba_hvd_tools.commands.checkpoint._COMPARED_BYTES", 100)
    assert as_json(capsys, "diff", saved.url, "000001-00000001") == whole


@pytest.mark.slow
def test_gc_deletes_only_when_asked(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(saved.url)
    store.put("blobs/000001-00000009/0000", [b"of a save that died"])
    with Checkpointer(saved.url, two_tables(3, 700), Config(job="job-1")):
        pass
    found = as_json(capsys, "gc", saved.url)
    assert "blobs/000001-00000009/0000" in found["objects"] and not found["deleted"]
    assert "add --yes" in said(capsys, "gc", saved.url)
    assert "blobs/000001-00000009/0000" in store.names("blobs/")
    assert "deleted" in said(capsys, "gc", saved.url, "--yes")
    assert "blobs/000001-00000009/0000" not in store.names("blobs/")
    assert "every byte" in said(capsys, "verify", saved.url)
    assert said(capsys, "gc", saved.url).startswith("0 objects")


def test_rollback_changes_nothing_without_yes(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    before = open_store(saved.url).names("")
    text = said(capsys, "rollback", saved.url, "000001-00000001")
    assert text.splitlines() == [
        "000001-00000002  step 5",
        "1 later checkpoint, to be deleted; 000001-00000001 (step 3) becomes the newest: add --yes to do it",
    ]
    assert as_json(capsys, "rollback", saved.url, "000001-00000001")["newest"] is None
    assert open_store(saved.url).names("") == before


@pytest.mark.slow
def test_rollback_makes_an_earlier_one_the_newest(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    done = as_json(capsys, "rollback", saved.url, "000001-00000001", "--yes")
    assert (done["newest"], done["deleted"]) == (
        "manifests/000002-00000001.json", [{"name": saved.newest, "step": 5}]
    )  # fmt: skip
    listed = as_json(capsys, "ls", saved.url)["checkpoints"]
    assert [(one["name"], one["step"]) for one in listed] == [(done["newest"], 3)]
    assert "every byte" in said(capsys, "verify", saved.url)
    store = open_store(saved.url)
    weights = np.zeros((700, 4), np.float32)
    read_rows(store, _chain(store, "newest"), 0, [weights, None, None])
    assert np.array_equal(weights, saved.values[3]["user"][:, :4])
    assert main(["checkpoint", "rollback", saved.url, "newest"]) == 1
    assert "there is nothing to go back from" in capsys.readouterr().err


def test_a_rollback_to_a_damaged_one_is_refused(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    blob, before = saved.blob("000001-00000001"), open_store(saved.url).names("")
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.write_bytes(data)
    assert main(["checkpoint", "rollback", saved.url, "000001-00000001", "--yes"]) == 1
    assert "nothing was changed: " in capsys.readouterr().err
    assert open_store(saved.url).names("") == before


@pytest.mark.slow
def test_delete_deletes_all_only_when_asked(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    store = open_store(saved.url)
    before = store.names("")
    n_bytes = sum(n for name, n in before.items() if not name.startswith("claims/"))
    shown = said(capsys, "delete", saved.url)
    assert shown.startswith(f"{saved.url}: 2 checkpoints, ")
    assert shown.endswith(f" objects, {n_bytes:,} bytes, to be deleted: add --yes to do it\n")
    assert store.names("") == before
    done = as_json(capsys, "delete", saved.url, "--yes")
    assert (done["deleted"], done["n_bytes"], done["checkpoints"][0]) == (True, n_bytes, saved.newest)
    assert not store.names("")
    assert said(capsys, "delete", saved.url, "--yes") == f"{saved.url}: no checkpoints\n"


@pytest.mark.slow
def test_a_folder_of_the_locations_of_several_jobs_is_refused_and_names_them(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").mkdir()
    for command in (["gc", "--yes"], ["ls"], ["delete", "--yes"]):
        assert main(["checkpoint", command[0], str(tmp_path), *command[1:]]) == 1
        assert capsys.readouterr().err == f"gba-hvd: there is no checkpoint in {tmp_path}, but in: {saved.url}\n"
    assert "every byte" in said(capsys, "verify", saved.url)


# --- export ----------------------------------------------------------------------------------------------------------


def columns_of(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    user = values["user"]
    return {"user": user[:, :4], "user/exp_avg": user[:, 4:8], "user/sum": user[:, 8:], "colour": values["colour"]}


@pytest.mark.parametrize(("name", "step"), [("newest", 5), ("000001-00000001", 3)])
@pytest.mark.parametrize("form", ["safetensors", "state_dict"])
def test_an_export_has_every_table_and_every_tensor_of_the_state(
    saved: Saved, form: str, name: str, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out" / ("model.safetensors" if form == "safetensors" else "model.pt")
    done = as_json(capsys, "export", saved.url, name, "--out", str(out))
    found = read_file(out)
    expected = columns_of(saved.values[step])
    assert found.keys() == {*expected, "mlp.weight", "mlp.bias", "state/optimizer/state/0/exp_avg"}
    for key, value in expected.items():
        assert found[key].dtype == torch.float32 and found[key].numpy().tobytes() == value.tobytes()
    assert torch.equal(found["mlp.weight"], STATE["model"]["mlp.weight"])
    assert found["state/optimizer/state/0/exp_avg"].dtype == torch.float64
    assert done["format"] == form and done["tensors"] == len(found) and not done["not_saved"]
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def read_file(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    found = torch.load(path, weights_only=True)
    assert isinstance(found, dict)
    return found


def test_an_export_of_weights_only_can_be_loaded_into_the_model(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = torch.nn.Module()
    for name, shape in (("user", (700, 4)), ("colour", (11, 2))):
        model.register_parameter(name, torch.nn.Parameter(torch.zeros(shape)))
    model.add_module("mlp", torch.nn.Linear(3, 2))
    said(capsys, "export", saved.url, "--out", str(tmp_path / "w.pt"), "--weights-only")
    model.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert np.array_equal(model.user.detach().numpy(), saved.values[5]["user"][:, :4])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_an_export_of_weights_only_has_the_names_of_the_model_before_convert(
    form: str, asynchronous: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state: Any = {"model": {"mlp.weight": torch.ones(2, 3)}}
    state["row_parameters"] = {"emb.user.weight": "user", "same.weight": "user", "colours.weight": "colour"}
    if asynchronous:
        values = np.full(6, 2.0, np.float32)
        state = {"snapshot": state, "dense": {"mlp.weight": {"values": values, "state": {}}}, "position": {}}
    rows = two_tables(n_rows=20)
    Saver(rows, open_store(tmp_path / "place")).save("full", state_codec.encode(state))
    out = tmp_path / f"w.{form}"
    said(capsys, "export", str(tmp_path / "place"), "--out", str(out), "--weights-only")
    found = read_file(out)
    assert found.keys() == {"emb.user.weight", "same.weight", "colours.weight", "mlp.weight"}
    assert torch.equal(found["mlp.weight"], torch.full((2, 3), 2.0 if asynchronous else 1.0))
    for name, table in (("emb.user.weight", "user"), ("same.weight", "user"), ("colours.weight", "colour")):
        assert torch.equal(found[name], rows.tables[table].weight)
    said(capsys, "export", str(tmp_path / "place"), "--out", str(out))
    assert {"user", "colour", "user/sum"} <= read_file(out).keys()


def test_an_export_that_fails_leaves_no_file(saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["checkpoint", "export", saved.url, "--out", str(tmp_path / "file" / "x.pt")]) == 1
    assert "name another file with --out" in capsys.readouterr().err
    blob = saved.blob("000001-00000001")
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    out = tmp_path / "out" / "x.pt"
    assert main(["checkpoint", "export", saved.url, "--out", str(out)]) == 1
    assert "checksum" in capsys.readouterr().err
    assert not list(out.parent.iterdir())


def test_state_in_a_format_of_its_own_is_left_out_and_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = two_tables(n_rows=20)
    with Checkpointer(str(tmp_path / "place"), rows, Config(job="job-1")) as checkpoints:
        checkpoints.save(1, 1, b"\x93NUMPY whatever").result(60)
    assert main(["checkpoint", "export", str(tmp_path / "place"), "--out", str(tmp_path / "x.safetensors")]) == 0
    assert "left out: the state: 15 bytes" in capsys.readouterr().err
    assert read_file(tmp_path / "x.safetensors").keys() == {"user", "user/exp_avg", "user/sum", "colour"}


# --- what the commands are made of -----------------------------------------------------------------------------------


@pytest.mark.parametrize("modulo", [1, 2, 3, 6, 7])
def test_rows_can_be_read_a_part_at_a_time_whatever_the_shards(saved: Saved, modulo: int) -> None:
    store = open_store(saved.url)
    chain, expected = _chain(store, "newest"), saved.values[5]["user"]
    for residue in range(modulo):
        weights = np.zeros((len(range(residue, 700, modulo)), 4), np.float32)
        there = read_rows(store, chain, 0, [weights, None, None], residue=residue, modulo=modulo)
        assert there.all()
        assert np.array_equal(weights, expected[residue::modulo, :4])


def test_a_blob_that_vanishes_while_it_is_read_is_damage(saved: Saved) -> None:
    store = open_store(saved.url)
    chain = _chain(store, "newest")
    saved.blob("000001-00000001").unlink()
    with pytest.raises(Damaged, match=r"000001-00000001\.json: .*no such object"):
        read_rows(store, chain, 0, [None, None, None])
    assert any("is gone" in flaw for flaw in verify(store, chain.base))


@pytest.mark.slow
def test_options_of_a_store_are_given_as_key_and_value(
    s3_options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for key, value in s3_options.items() for part in ("--option", f"{key}={value}")]
    assert "no checkpoints" in said(capsys, "ls", "s3://checkpoints/nothing-here", *options)
    assert main(["checkpoint", "ls", "s3://checkpoints/nothing-here", "--option", "key"]) == 1
    assert "expected KEY=VALUE" in capsys.readouterr().err


def test_rows_never_saved_are_zero_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a host was lost for good: a base lacks them only if a writer was asked to leave them."""
    from dataclasses import replace

    from recovery.format.manifest import from_json, to_json

    rows: TensorRows = two_tables(n_rows=30, n_shards=2)
    with Checkpointer(str(tmp_path / "place"), rows, Config(job="job-1")) as checkpoints:
        name = checkpoints.save(1, 1).result(60).manifest.name
    path = tmp_path / "place" / name
    manifest = from_json(path.read_bytes(), name)
    *_, last = manifest.blobs[-1].sections
    kept = replace(
        manifest.blobs[-1], n_bytes=last.start, sections=manifest.blobs[-1].sections[:-1]
    )  # the last section is cut off, and nobody misses it
    path.write_bytes(to_json(replace(manifest, blobs=(*manifest.blobs[:-1], kept))))
    blob = tmp_path / "place" / kept.name
    blob.write_bytes(blob.read_bytes()[: kept.n_bytes])
    done = as_json(capsys, "export", str(tmp_path / "place"), "--out", str(tmp_path / "x.safetensors"))
    table = manifest.schema.tables[last.table].name
    assert done["not_saved"] == {table: last.n_rows}
    assert (read_file(tmp_path / "x.safetensors")[table] == 0).all(dim=1).sum() == last.n_rows
