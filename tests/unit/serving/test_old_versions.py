"""What no version that is kept names goes, and a save that runs meanwhile does not name what is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.cli import main
from torch import nn

import gba_hvd
from gba_hvd import BadInput
from gba_hvd.serving import save
from gba_hvd.serving.compare import verify_model
from gba_hvd.serving.manifest import next_version, no_new_version, read_manifest, versions
from gba_hvd.serving.old_versions import delete_unneeded, unneeded
from recovery.errors import Damaged, StoreError
from recovery.storage.open import open_store
from tests.unit.serving.conftest import CODE, batch, change_rows, evaluated

Trained = Callable[..., nn.Module]


@pytest.mark.slow
def test_all_that_versions_name_is_kept(three: Any) -> None:
    store = open_store(three[1])
    assert (unneeded(store).versions, dict(unneeded(store).objects)) == ((), {})
    store.put("rows/ab/" + "ab" * 32, [b"of a save that died"])
    store.put("blobs/000001-00000001/0000", [b"of a checkpoint"])
    before = store.names("")
    assert dict(unneeded(store).objects) == {"rows/ab/" + "ab" * 32: 19}
    assert store.names("") == before
    assert delete_unneeded(store).n_bytes == 19
    assert set(before) - set(store.names("")) == {"rows/ab/" + "ab" * 32}


@pytest.mark.slow
def test_old_versions_go_with_what_only_they_name(three: Any) -> None:
    model, folder = three
    store = open_store(folder)
    needed = {one.name for version in (2, 3) for one in read_manifest(store, version).objects()}
    found = delete_unneeded(store, keep_last=2)
    assert (found.versions, found.kept, versions(store)) == ((1,), (2, 3), [2, 3])
    assert found.n_bytes > 0 and set(store.names("rows/") | store.names("files/")) == needed
    for version in (2, 3):
        assert not verify_model(store, read_manifest(store, version))
    assert torch.equal(gba_hvd.load_for_inference(folder)(batch(9)), evaluated(model, batch(9)))
    assert gba_hvd.save_model(model, folder, build=CODE).version == 4


@pytest.mark.slow
def test_nothing_goes_where_it_is_not_known_what_is_needed(three: Any, tmp_path: Path) -> None:
    store = open_store(three[1])
    path = three[1] / "versions" / "000002.json"
    path.write_bytes(path.read_bytes()[:100])
    before = store.names("")
    with pytest.raises(Damaged, match=r"000002\.json"):
        delete_unneeded(store, keep_last=2)
    with next_version(store), pytest.raises(StoreError, match="a save completes a version"):
        delete_unneeded(store, keep_last=1)
    with pytest.raises(BadInput, match="at least the newest"):
        delete_unneeded(store, keep_last=0)
    with pytest.raises(BadInput, match="has no model"):
        delete_unneeded(open_store(tmp_path / "none"))
    assert store.names("") == before


@pytest.mark.slow
def test_a_save_whose_objects_were_deleted_meanwhile_is_refused(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, store, deleted = trained(), open_store(tmp_path / "m"), []
    gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    change_rows(model, "user", np.arange(4), seed=1)
    put_file = save.put_file

    def deleting(*args: Any) -> Any:
        deleted.append(delete_unneeded(store).objects)
        return put_file(*args)

    with monkeypatch.context() as patched:
        patched.setattr(save, "put_file", deleting)
        with pytest.raises(StoreError, match="was deleted while the model was saved"):
            gba_hvd.save_model(model, tmp_path / "m", build=CODE)
    assert deleted[0] and versions(store) == [1]
    assert gba_hvd.save_model(model, tmp_path / "m", build=CODE).version == 2
    assert not verify_model(store, read_manifest(store))


@pytest.mark.slow
def test_a_save_that_comes_while_objects_are_deleted_is_refused(three: Any) -> None:
    model, store = three[0], open_store(three[1])
    with no_new_version(store), pytest.raises(StoreError, match="save again when it has ended"):
        gba_hvd.save_model(model, three[1], build=CODE)
    assert versions(store) == [1, 2, 3] and not store.names("versions/deletes-")
    assert gba_hvd.save_model(model, three[1], build=CODE).version == 4


@pytest.mark.slow
def test_what_people_put_beside_the_model_stays(three: Any) -> None:
    store = open_store(three[1])
    foreign = ["rows/export.parquet", "files/thesis.pdf", "rows/ab/" + "g" * 64]
    for name in foreign:
        store.put(name, [b"theirs"])
    delete_unneeded(store, keep_last=1)
    assert set(foreign) <= set(store.names(""))


@pytest.mark.slow
@pytest.mark.parametrize("left", ["versions/deletes-" + "ab" * 8, "versions/000004-" + "ab" * 8])
def test_what_a_killed_process_left_is_removed_by_force(three: Any, left: str) -> None:
    model, folder = three
    store = open_store(folder)
    store.put(left, [b"claimed"])
    if "deletes" in left:
        with pytest.raises(StoreError, match=r"`gba-hvd model gc` or `rollback` .*that command with --yes --force"):
            gba_hvd.save_model(model, folder, build=CODE)
        with pytest.raises(StoreError, match="another process deletes versions"):
            delete_unneeded(store)
    else:
        with pytest.raises(StoreError, match=r"a save completes a version.*--yes --force removes"):
            delete_unneeded(store)
    assert main(["model", "gc", str(folder), "--force"]) != 0 and left in store.names("versions/")
    assert main(["model", "gc", str(folder), "--yes", "--force"]) == 0
    assert left not in store.names("versions/") and versions(store) == [1, 2, 3]
    assert gba_hvd.save_model(model, folder, build=CODE).version == 4


@pytest.mark.slow
def test_the_command_deletes_only_when_asked(three: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gc = ["model", "gc", str(three[1]), "--keep-last", "1"]
    assert main(gc) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("versions 1, 2, ") and shown.endswith(
        "to be deleted: add --yes to do it (kept: version 3)\n"
    )
    assert versions(open_store(three[1])) == [1, 2, 3]
    assert main([*gc, "--yes"]) == 0
    assert capsys.readouterr().out == shown.replace(", to be deleted: add --yes to do it", " deleted")
    assert versions(open_store(three[1])) == [3]
    assert main(gc) == 0
    assert capsys.readouterr().out == "0 objects that no version names, 0 bytes (kept: version 3)\n"
