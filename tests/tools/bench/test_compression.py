"""What the benchmark of compression computes from its runs. No launch of a job."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import astuple, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gba_hvd_tools.bench import row_compression
from gba_hvd_tools.bench.allreduce import batches
from gba_hvd_tools.bench.allreduce.shape import SHAPES
from gba_hvd_tools.bench.compression import command as compression
from gba_hvd_tools.bench.compression import peers, workload
from gba_hvd_tools.bench.compression.workload import Phase
from gba_hvd_tools.bench.harness import dlrm, measure, small_ctr

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


def test_medians_over_the_runs_count() -> None:
    speed = [row("wide", "none", "1gbit", seconds, 10.0, sent_dense=8.0) for seconds in (1.0, 9.0, 2.0)]
    speed += [row("wide", "dct_dp", "1gbit", 1.0, wire, sent_dense=2.0) for wire in (5.0, 1.0, 2.0)]
    found = compression.headline(speed, [])
    assert found["time_vs_none"] == {"wide": {"1gbit": {"none": 1.0, "dct_dp": 0.5}}}
    assert found["bytes_ratio_wire"]["wide"]["1gbit"]["dct_dp"] == 5.0
    assert found["bytes_ratio_dp"] == 4.0


def test_bytes_by_our_own_count_are_those_of_the_link_where_they_are_least() -> None:
    speed = [row("wide", "none", link, 1.0, 1.0, sent_dense=80.0) for link in ("100mbit", "unlimited")]
    speed += [row("wide", "dct_dp", "100mbit", 1.0, 1.0, sent_dense=n) for n in (1.0, 2.0, 4.0)]
    speed += [row("wide", "dct_dp", "unlimited", 1.0, 1.0, sent_dense=80.0)] * 4  # bypassed there
    assert compression.headline(speed, [])["bytes_ratio_dp"] == 40.0


def test_ours_that_take_more_than_two_percent_longer_than_none_are_reported() -> None:
    speed = [
        row("dlrm", name, "unlimited", seconds, 1.0)
        for name, seconds in (("none", 1.0), ("int8", 1.02), ("dct_mp", 1.021), ("horovod", 3.0))
    ]
    speed += [row("wide", name, "unlimited", 1.0, 1.0) for name in ("none", "int8")]
    assert compression.headline(speed, [])["over_none"] == {"dlrm": {"unlimited": {"dct_mp": 1.021}}}


def test_the_target_is_met_when_none_of_ours_is_over_it_and_unknown_without_a_comparison(
    capsys: pytest.CaptureFixture[str],
) -> None:
    met = [row("wide", name, "1gbit", 1.0, 1.0) for name in ("none", "int8")]
    for speed, expected in ((met, {}), (met[:1], None), (met[1:], None)):
        found = compression.headline(speed, [])
        assert found["over_none"] == expected
        compression.show(speed, found)
        assert ("the target is met" in capsys.readouterr().out) == (expected == {})


def test_launches_alternate_and_every_model_has_rivals() -> None:
    names, links = [*compression.OURS, *compression.PEERS], ["100mbit", "unlimited"]
    runs = [astuple(run) for run in compression.planned_runs(["wide", "dlrm"], links, names, 2, 0)]
    first, second = runs[: len(runs) // 2], runs[len(runs) // 2 :]
    assert [run[:3] for run in first] == [run[:3] for run in second]
    assert {run[3] for run in first} == {0} and {run[3] for run in second} == {1}
    assert [name for model, link, name, _ in first if (model, link) == ("wide", "unlimited")] == names
    of_dlrm = [name for model, link, name, _ in first if (model, link) == ("dlrm", "100mbit")]
    assert of_dlrm == [name for name in names if name != "powersgd"]
    assert first[0][:3] == ("wide", "100mbit", names[0]) and first[1][:3] == ("wide", "100mbit", names[1])
    assert "not the DLRM" in compression.PEERS["powersgd"]


class Launches:
    """In place of those between namespaces."""

    def __init__(self, *_: object) -> None: ...

    def row_of(self, one: compression.Run) -> measure.Row:
        if one.contestant == "ddp" and one.link == "1gbit":
            raise measure.RunFailed("no luck")
        figures = {"auc": 0.5} if one.link is None else {"s_per_step": 1.0, "wire_bytes": 8.0, "own_bytes": {}}
        return {**figures, **vars(one)}


def test_a_second_call_launches_only_what_has_no_row_and_refuses_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(*words: str) -> int:
        parser = argparse.ArgumentParser()
        compression.add_parser(parser.add_subparsers())
        args = parser.parse_args(["compression", "--out", str(tmp_path / "out.json"), "--models", "wide", *words])
        return int(args.run(args))

    monkeypatch.setattr(compression, "Launches", Launches)
    monkeypatch.setattr(compression, "VirtualHosts", lambda *_: nullcontext())
    assert measured("--contestants", "none", "ddp", "--links", "100mbit", "1gbit", "--seeds", "2") == 1
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["failures"] == {"wide, ddp, 1gbit, run 1": "no luck"} and found["auc"] == {"none": 0.5, "ddp": 0.5}
    assert [(row["contestant"], row["run"]) for row in found["rows"] if row["model"] == "small"] == [
        ("none", 0), ("ddp", 0), ("none", 1), ("ddp", 1)
    ]  # fmt: skip
    capsys.readouterr()
    monkeypatch.setattr(Launches, "row_of", lambda _, one: {"s_per_step": 2.0, "wire_bytes": 8.0, **vars(one)})
    assert measured("--contestants", "none", "ddp", "--links", "100mbit", "1gbit", "--seeds", "2", "--runs", "1") == 0
    printed, whole = capsys.readouterr().out, json.loads((tmp_path / "out.json").read_text())
    assert "7 rows in" in printed and "1 runs to do" in printed
    assert whole["rows"][:-1] == found["rows"] and not whole["failures"]
    assert whole["time_vs_none"]["wide"]["1gbit"] == {"none": 1.0, "ddp": 2.0}
    assert measured("--always") == 1
    assert "other settings (always: False in the file, True now)" in capsys.readouterr().err
    assert json.loads((tmp_path / "out.json").read_text()) == whole


def test_the_settings_say_what_the_short_names_mean() -> None:
    assert compression.settings()["ours"]["both"] == {
        "dense": "dct(keep=0.01, refresh_every=1000).then(int8)",
        "rows": "ternary_ef(keep=0.02, refresh_every=1000, drift=1.25).then(int8)",
    }


@pytest.mark.slow
def test_the_peers_train_the_dlrm_with_sparse_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(SHAPES["dlrm"], tables=dict.fromkeys(SHAPES["dlrm"].tables, 50))
    monkeypatch.setitem(SHAPES, "dlrm", shape)
    monkeypatch.setitem(workload.BATCH, "dlrm", 8)
    batches.write(tmp_path, shape, 8, 2, 2)
    phases = [Phase("unlimited", 1, 2)]
    args = argparse.Namespace(model="dlrm", data=tmp_path, phases=phases, seed=0)
    source, n_samples = peers.samples_of(args, 1, 2)
    first, second, third = islice(source, 3)
    assert n_samples == 2 * 8 * 3
    assert first[0] is third[0] and not torch.equal(first[1], second[1]), "batches in turn"
    assert torch.equal(first[0].dense, batches.load(tmp_path, shape, 1)[0].dense), "of its own part"
    model, lr, eps = peers.model_of("dlrm")
    assert (lr, eps) == (dlrm.LEARNING_RATE, dlrm.EPS)
    torch.nn.functional.binary_cross_entropy_with_logits(model(first[0]), first[1]).backward()
    sparse = [p.shape for p in model.parameters() if p.grad is not None and p.grad.is_sparse]
    assert sparse == [(50, dlrm.DIM)] * dlrm.N_TABLES


def test_horovods_fp16_leaves_sparse_gradients_as_they_came() -> None:
    fp16, gradient = peers.fp16_of_dense_gradients(), torch.tensor([1.0, 1.0 + 2**-14])
    sent, dtype = fp16.compress(gradient)
    assert sent.dtype == torch.float16
    assert fp16.decompress(sent, dtype).tolist() == [1.0, 1.0]
    assert fp16.decompress(gradient, None) is gradient  # as Horovod calls it for what it did not compress


def test_bytes_of_a_host_are_those_of_all_links_but_its_own() -> None:
    assert workload.interface_bytes(NET) == 1545


def test_phases_are_given_on_the_command_line() -> None:
    assert workload.phases_of("100mbit:3:10,unlimited:1:2") == [
        Phase("100mbit", 3, 10),
        Phase("unlimited", 1, 2),
    ]
    assert workload.n_steps(workload.phases_of("1gbit:3:10,unlimited:1:2")) == 16


def test_the_wide_model_has_ten_million_parameters() -> None:
    assert sum(p.numel() for p in small_ctr.Tower(workload.HIDDEN["wide"]).parameters()) == pytest.approx(
        10e6, rel=0.02
    )


@pytest.mark.parametrize("rule", row_compression.RULES)
@pytest.mark.parametrize("is_async", [False, True])
def test_rows_between_two_hosts_of_one_process_are_those_of_a_job(rule: str, is_async: bool) -> None:
    """Bytes as they would travel; and with feedback the gradients that came are those that were sent."""
    rng, dim, keys = np.random.default_rng(0), 8, np.arange(0, 4000, 7)
    way = row_compression.Way(row_compression.specs_of(rule)[1], [4000], dim, is_async)
    sent, came = np.zeros((len(keys), dim)), np.zeros((len(keys), dim))
    for _ in range(50):
        values = rng.normal(size=(len(keys), dim)).astype(np.float32)
        seen = way.pull(keys, values)
        assert (seen * values >= 0).all()
        grads = (1 + 0.1 * rng.normal(size=values.shape)).astype(np.float32)
        sent += grads
        came += way.push(keys, grads)
    assert way.n_plain == 50 * len(keys) * 2 * (8 + 4 * dim)
    assert (way.n_bytes == way.n_plain) is (rule == "none") and way.n_bytes <= way.n_plain
    waits = abs(came.sum() / sent.sum() - 1)
    if rule.startswith("dct_mp"):  # no feedback: what the mask leaves out is lost
        assert waits > 0.9
    else:
        assert waits < (0.6 if "ternary" in rule else 0.01)


@pytest.mark.slow
@pytest.mark.parametrize("mode", row_compression.MODES)
@pytest.mark.parametrize("rule", ["dct_mp:1.0:100", "dct_dp:1.0:100", "ternary_ef:1.0:100"])
def test_two_hosts_of_one_process_learn_as_without_compression_where_everything_is_kept(rule: str, mode: str) -> None:
    problem = row_compression.problem_of("synthetic", None, 20_000, 1)
    plain, kept = (row_compression.train(problem, name, mode, 0) for name in ("none", rule))
    assert plain["auc"] > 0.6 and kept["auc"] == pytest.approx(plain["auc"], abs=0.005)
    assert kept["bytes_ratio"] > 1 and kept["density"] > 0.9  # gradients that are 0 are not sent
