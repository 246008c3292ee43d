"""Argument beats environment beats default, and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gba_hvd.config import Config
from gba_hvd.errors import BadInput


def test_argument_beats_environment_beats_default() -> None:
    environ = {"GBA_HVD_N_SHARDS": "8", "GBA_HVD_SHARD_DIR": "/tmp/a", "GBA_HVD_TIMEOUT_S": "2.5"}
    config = Config.from_env(environ, n_shards=4, shard_dir=None)
    assert config == Config(shard_dir=Path("/tmp/a"), n_shards=4, timeout_s=2.5)
    assert Config.from_env({}) == Config()


def test_a_folder_may_be_a_string() -> None:
    assert Config.from_env({}, shard_dir="/tmp/b").shard_dir == Path("/tmp/b")
    assert Config.from_env({}, shard_dir="b").shard_dir == Path.cwd() / "b", "servers have another working directory"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_shards": 0}, "n_shards must be at least 1, got 0"),
        ({"timeout_s": 0.0}, "timeout_s must be positive"),
        ({"grace_s": -1.0}, "grace_s must not be negative"),
        ({"job_id": "a/b"}, "job_id must be 1 to 64 letters"),
        ({"job_id": ""}, "job_id must be"),
    ],
)
def test_a_bad_setting_is_refused_at_construction(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        Config(**settings)


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(BadInput, match="GBA_HVD_N_SHARDS='many'"):
        Config.from_env({"GBA_HVD_N_SHARDS": "many"})
