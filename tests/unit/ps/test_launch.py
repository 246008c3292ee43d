"""What a job's folder says of its servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gba_hvd.ps import launch


@pytest.mark.parametrize("text", ['{"address": "/tmp/x', "", "[1, 2]", '{"pid": null}', "{}"])
def test_a_damaged_address_names_no_process(tmp_path: Path, text: str) -> None:
    (tmp_path / "ps-0.address").write_text(text)
    assert launch.pid_of(tmp_path, 0) is None
    launch.kill(tmp_path, 0)


def test_an_address_names_its_process(tmp_path: Path) -> None:
    assert launch.pid_of(tmp_path, 0) is None
    (tmp_path / "ps-0.address").write_text('{"pid": 12}')
    assert launch.pid_of(tmp_path, 0) == 12
