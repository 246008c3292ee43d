"""What the benchmark of compression computes from its runs. No launch of a job."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gba_hvd_tools.bench import compressed_model, compression, rows, small_ctr
from gba_hvd_tools.bench.compressed_model import Phase

NET = """\
Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:  999999      10    0    0    0     0          0         0   999999      10    0    0    0     0       0          0
  eth0:    1200       9    0    0    0     0          0         0      345       6    0    0    0     0       0          0
"""  # noqa: E501


def row(model: str, name: str, link: str, seconds: float, wire: float, **own: float) -> dict[str, Any]:
    return {
        "model": model, "contestant": name, "link": link, "s_per_step": seconds, "wire_bytes": wire, "own_bytes": own,
    }  # fmt: skip


SPEED = [
    row("wide", "none", "100mbit", 4.0, 80e6, sent_dense=40e6, received_dense=40e6),
    row("wide", "dct_dp", "100mbit", 1.0, 1e6, sent_dense=2e5, received_dense=2e5),
    row("wide", "dct_dp", "unlimited", 1.0, 80e6, sent_dense=40e6, received_dense=40e6),  # bypassed there
    row("wide", "horovod", "100mbit", 5.0, 84e6),
    row("dlrm", "none", "100mbit", 1.0, 8e6, sent_rows=4e6, received_header=2e6, sent_dense=9e6),
    row("dlrm", "dct_mp", "100mbit", 0.5, 1e6, sent_rows=2e5, received_header=1e5, sent_dense=9e6),
]
QUALITY = [
    {"contestant": "none", "seed": 0, "auc": 0.77},
    {"contestant": "none", "seed": 1, "auc": 0.79},
    {"contestant": "dct_dp", "seed": 0, "auc": 0.781},
]


def test_the_headline_has_ratios_of_bytes_time_and_auc() -> None:
    found = compression.headline(SPEED, QUALITY)
    assert found["bytes_ratio_dp"] == pytest.approx(200)
    assert found["bytes_ratio_mp"] == pytest.approx(20)
    assert found["time_vs_none"]["wide"]["100mbit"] == {"none": 1.0, "dct_dp": 0.25, "horovod": 1.25}
    assert found["time_saved_vs_best_uncompressed"] == {"wide": {"100mbit": 0.75}, "dlrm": {"100mbit": 0.5}}
    assert found["bytes_ratio_wire"]["wide"]["100mbit"]["dct_dp"] == pytest.approx(80)
    assert found["auc_delta"] == pytest.approx({"none": 0.0, "dct_dp": 0.001})


def test_without_what_it_is_compared_to_there_is_no_ratio() -> None:
    found = compression.headline(SPEED[1:3], [])
    assert found["bytes_ratio_dp"] is None and found["auc_delta"] == {} and found["time_vs_none"] == {}


def test_bytes_of_a_host_are_those_of_all_links_but_its_own() -> None:
    assert compressed_model.interface_bytes(NET) == 1545


def test_phases_are_told_on_the_command_line() -> None:
    assert compressed_model.phases_of("100mbit:3:10,unlimited:1:2") == [
        Phase("100mbit", 3, 10),
        Phase("unlimited", 1, 2),
    ]
    assert compressed_model.n_steps(compressed_model.phases_of("1gbit:3:10,unlimited:1:2")) == 16


def test_the_wide_model_has_ten_million_parameters() -> None:
    assert sum(p.numel() for p in small_ctr.Tower(compressed_model.HIDDEN["wide"]).parameters()) == pytest.approx(
        10e6, rel=0.02
    )


@pytest.mark.parametrize("name", list(rows.SPECS))
def test_rows_between_two_hosts_of_one_process_are_those_of_a_job(name: str) -> None:
    """Bytes as they would travel; and with feedback the gradients that came are those that were sent."""
    rng, dim, keys = np.random.default_rng(0), 8, np.arange(0, 4000, 7)
    way, sent, came = rows.Way(rows.coder_of(name, dim)), np.zeros((len(keys), dim)), np.zeros((len(keys), dim))
    for _ in range(50):
        values = rng.normal(size=(len(keys), dim)).astype(np.float32)
        seen = way.pull(keys, values)
        assert (seen * values >= 0).all()
        grads = (1 + 0.1 * rng.normal(size=values.shape)).astype(np.float32)
        sent += grads
        came += way.push(keys, grads)
    assert way.n_plain == 50 * len(keys) * 2 * (8 + 4 * dim)
    assert (way.n_bytes == way.n_plain) is (name == "none") and way.n_bytes <= way.n_plain
    waits = abs(came.sum() / sent.sum() - 1)
    assert waits < (0.6 if "dct(0.02)" in name else 0.4 if "dct" in name else 0.01)
