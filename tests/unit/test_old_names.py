"""Public names of the release before are accepted, and warn."""

from __future__ import annotations

import numpy as np
import pytest

import gba_hvd
import gba_hvd.config
import recovery
from gba_hvd.errors import BadInput
from gba_hvd.shm.layout import Layout


@pytest.mark.parametrize(
    ("old", "new"),
    [("Now", "TrainingPoint"), ("Parts", "RowParts"), ("rest", "dense_state"), ("load_rest", "load_dense_state")],
)
def test_an_old_name_of_recovery_is_the_new_one(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"recovery.{new}"):
        assert getattr(recovery, old) is getattr(recovery, new)


@pytest.mark.parametrize(
    ("kind", "old", "new", "value"),
    [
        (recovery.Config, "r", "row_fraction", 0.25),
        (recovery.Config, "puts", "concurrent_puts", 3),
        (gba_hvd.config.Config, "alive_s", "heartbeat_timeout_s", 7.0),
        (gba_hvd.config.Config, "server_s", "server_timeout_s", 7.0),
    ],
)
def test_an_old_setting_is_the_new_one(kind: type, old: str, new: str, value: float) -> None:
    more = {"policy": "mfu"} if new == "row_fraction" else {}
    with pytest.warns(DeprecationWarning, match=new) as reported:
        config = kind(**{old: value}, **more)
    assert [one.filename for one in reported] == [__file__], "Python shows such a warning where it is the script's own"
    assert getattr(config, new) == value
    with pytest.warns(DeprecationWarning, match=new):
        assert getattr(config, old) == value
    with pytest.warns(DeprecationWarning, match=new) as reported:
        assert kind.from_env({}, **{old: value}, **more) == config
    assert [one.filename for one in reported] == [__file__]
    with pytest.raises(BadInput, match="give one of them"):
        kind(**{old: value, new: value})


def test_old_variables_are_still_read_and_new_ones_win() -> None:
    found = recovery.Config.from_env({"RECOVERY_R": "0.5", "RECOVERY_PUTS": "2"}, policy="mfu")
    assert found == recovery.Config(policy="mfu", row_fraction=0.5, concurrent_puts=2)
    both = {"RECOVERY_R": "0.5", "RECOVERY_ROW_FRACTION": "0.25"}
    assert recovery.Config.from_env(both, policy="mfu").row_fraction == 0.25
    config = gba_hvd.config.Config.from_env({"GBA_HVD_ALIVE_S": "3", "GBA_HVD_SERVER_S": "4"})
    assert (config.heartbeat_timeout_s, config.server_timeout_s) == (3.0, 4.0)


def test_old_arguments_of_the_checkpoint_callback(tmp_path) -> None:
    with pytest.warns(DeprecationWarning, match="is now called"):
        callback = recovery.CheckpointCallback(tmp_path, last_gasp_s=5.0, memory_share=0.5)
    assert (callback.final_checkpoint_s, callback.retain_state_share) == (5.0, 0.5)


def test_an_old_method_of_the_switching_callback_is_the_new_one() -> None:
    callback = gba_hvd.GBACallback(mode="async")
    with pytest.warns(DeprecationWarning, match="GBACallback.mode_request"):
        assert callback.wish(1, "allreduce") == callback.mode_request(1, "allreduce") is not None


def test_an_old_method_of_the_layout_is_the_new_one() -> None:
    layout = Layout.of({"user": (7, 2)}, (), n_shards=3, seed=0, init_std=0.1)
    keys = np.arange(7)
    with pytest.warns(DeprecationWarning, match="Layout.record_starts"):
        assert np.array_equal(layout.places(keys, layout.groups[0]), layout.record_starts(keys, layout.groups[0]))


def test_an_old_field_of_the_job_is_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match="is_host_leader"):
        job = gba_hvd.Job("id", 0, 1, 0, "here", leads_host=True)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="is_host_leader"):
        assert job.leads_host is job.is_host_leader is True
