"""What the checkpoint benchmark concludes from what it measures, and what it leaves out."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from gba_hvd_tools.bench.checkpoint import analysis, savers
from gba_hvd_tools.bench.checkpoint import command as checkpoint
from gba_hvd_tools.bench.checkpoint.analysis import CONTESTANTS, RESTORES, Case, cases, headline, stall, why_not
from gba_hvd_tools.bench.checkpoint.model import BATCH, Training, hot_rows, made

GB = 10**9


def a_row(contestant: str, n_bytes: int = GB, **values: float) -> dict:
    row = {"contestant": contestant, "case": contestant, "table_bytes": n_bytes, "run": 0, "peak_extra_bytes": 0}
    return row | {"stall_s": 1.0, "stall_net_s": 1.0, "bytes": n_bytes, "bytes_per_s": 1.0} | values


# --- stalls ----------------------------------------------------------------------------------------------------------


def test_a_stall_is_the_call_and_what_steps_took_longer():
    found = stall([0.01] * 10, [0.01, 0.03, 0.01, 0.05], blocked_s=0.5)
    assert found["stall_s"] == pytest.approx(0.5 + 0.02 + 0.04)
    assert found["stall_net_s"] == pytest.approx(found["stall_s"])  # quiet training was even
    assert (found["longest_step_s"], found["steps"]) == (0.05, 4)


def test_steps_that_vary_anyway_are_no_net_stall():
    uneven = [0.01, 0.01, 0.04] * 10
    found = stall(uneven, uneven, blocked_s=0.0)
    assert found["stall_s"] == pytest.approx(0.3)
    assert found["stall_net_s"] == pytest.approx(0.0)


def test_faster_steps_do_not_make_up_for_a_stall():
    assert stall([0.02] * 3, [0.01, 0.01, 0.04], blocked_s=0.0)["stall_s"] == pytest.approx(0.02)


def test_a_save_that_is_over_at_once_stalls_as_long_as_its_call():
    assert stall([0.01], [], blocked_s=0.2)["stall_s"] == 0.2


# --- what is run -----------------------------------------------------------------------------------------------------


def test_only_a_delta_is_measured_for_each_share_of_changed_rows():
    found = cases(["ours_full", "ours_delta", "ours_mfu", "dcp"], [0.01, 0.1])
    assert [case.name for case in found] == ["ours_full", "ours_delta 0.01", "ours_delta 0.1", "ours_mfu", "dcp"]
    assert Case("ours_mfu", 1.0) in found


def test_a_delta_of_another_process_is_measured_for_the_smallest_share():
    found = cases(["ours_process_full", "ours_process_delta", "ours_process_mfu"], [0.1, 0.01])
    assert [case.name for case in found] == ["ours_process_full", "ours_process_delta 0.01", "ours_process_mfu"]
    assert Case("ours_process_mfu", 1.0) in found


def test_every_contestant_can_be_made_and_every_restore_is_of_one():
    assert set(RESTORES) <= set(CONTESTANTS)
    assert set(analysis.COPIES) <= {*CONTESTANTS, *(how for ways in RESTORES.values() for how in ways)}
    assert {name for name in CONTESTANTS if not name.startswith("ours")} == set(savers.PEERS)


def test_what_does_not_fit_is_left_out_with_the_reason():
    assert why_not("ours_full", 8 * GB, free_memory=16 * GB, free_disk=100 * GB) is None
    assert why_not("dcp_async", 8 * GB, free_memory=16 * GB, free_disk=100 * GB) == (
        "needs about 17.9 GB of memory, 16.0 GB are free"
    )
    assert why_not("ours_full", 8 * GB, free_memory=16 * GB, free_disk=10 * GB) == (
        "needs about 17.9 GB of disk, 10.0 GB are free"
    )


def test_a_size_that_does_not_fit_is_reported_not_run(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "lacking", lambda what, n_bytes, scratch: "too large")
    args = type("Args", (), {"runs": 2})()
    case, skipped = Case("plain", 0.1), []
    assert checkpoint.of_size(GB, {case: checkpoint.variant(case, "python")}, tmp_path, args, skipped) == []
    assert skipped == [{"case": "plain", "bytes": GB, "why": "too large"}]


def test_a_peer_that_fails_is_reported_and_ours_ends_the_benchmark(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise checkpoint.RunFailed("no luck")

    monkeypatch.setattr(checkpoint, "measured", fails)
    monkeypatch.setattr(checkpoint, "lacking", lambda *_: None)
    args, skipped = type("Args", (), {"runs": 1})(), []
    peer, ours = Case("dcp", 0.1), Case("ours_full", 0.1)
    assert checkpoint.of_size(GB, {peer: checkpoint.variant(peer, "python")}, tmp_path, args, skipped) == []
    assert skipped == [{"case": "dcp", "bytes": GB, "run": 0, "why": "no luck"}]
    with pytest.raises(checkpoint.RunFailed):
        checkpoint.of_size(GB, {ours: checkpoint.variant(ours, "python")}, tmp_path, args, skipped)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_the_headline_has_a_figure_for_each_size():
    rows = [
        a_row("ours_full", GB, stall_s=0.1, bytes_per_s=80.0, peak_extra_bytes=5, **{"restore_s ours": 1.0}),
        a_row("ours_full", GB, stall_s=0.3, bytes_per_s=80.0, peak_extra_bytes=7, **{"restore_s ours": 1.0}),
        a_row("ours_full", GB, stall_s=0.2, bytes_per_s=80.0, peak_extra_bytes=6, **{"restore_s ours": 1.0}),
        a_row("ours_full", 2 * GB, stall_s=0.5),
        a_row("ours_alone_full", GB, bytes_per_s=90.0),
        a_row("ours_process_full", GB, stall_s=0.02, bytes_per_s=70.0),
        a_row("ours_process_full", 2 * GB, stall_s=0.1),
        a_row("ours_mfu", GB, bytes=GB // 8),
        a_row("dcp_async", GB, stall_s=2.0),
        a_row("dcp_async", 2 * GB, stall_s=2.0),
        a_row("torch_save", GB, **{"restore_s torch_load": 2.0}),
        a_row("plain", GB, bytes_per_s=100.0),
    ]
    found = headline(rows)
    assert found["stall_vs_async_save"] == {str(GB): pytest.approx(0.01), str(2 * GB): pytest.approx(0.05)}
    assert found["stall_vs_async_save_threads"] == {str(GB): pytest.approx(0.1), str(2 * GB): pytest.approx(0.25)}
    assert found["write_efficiency"] == {str(GB): pytest.approx(0.9)}
    assert found["write_efficiency_training"] == {str(GB): pytest.approx(0.8)}
    assert found["write_efficiency_training_process"] == {str(GB): pytest.approx(0.7)}
    assert found["mfu_bytes_share"] == {str(GB): 0.125}
    assert found["restore_vs_torch_load"] == {str(GB): 0.5}
    assert found["peak_extra_bytes"] == {str(GB): 7, str(2 * GB): 0}  # the largest, not the median


def test_a_contestant_that_did_not_run_makes_no_figure():
    found = headline([a_row("ours_full")])
    assert found["stall_vs_async_save"] == found["write_efficiency"] == found["restore_vs_torch_load"] == {}


def test_medians_are_by_size_and_case():
    rows = [a_row("plain", stall_s=s) for s in (1.0, 2.0, 9.0)]
    assert analysis.figures(rows)[str(GB)]["plain"]["stall_s"] == 2.0


# --- the model -------------------------------------------------------------------------------------------------------


def test_every_process_makes_the_same_model_and_changes_the_same_rows():
    (first, first_optimizer), (second, _) = made(2_000_000), made(2_000_000)
    assert all(a.equal(b) for a, b in zip(first.weights, second.weights, strict=True))
    assert all(first_optimizer.state[weight]["sum"].min() > 0 for weight in first.weights)
    assert all(np.array_equal(a, b) for a, b in zip(hot_rows(first, 0.5), hot_rows(second, 0.5), strict=True))


def test_training_changes_hot_rows_and_no_others():
    model, optimizer = made(2_000_000)
    before = [weight.detach().clone() for weight in model.weights]
    hot = hot_rows(model, 0.5)
    training = Training(model, optimizer, hot, contextlib.nullcontext)
    for _ in range(-(-len(hot[0]) // BATCH)):
        training.step()
    for weight, old, rows in zip(model.weights, before, hot, strict=True):
        changed = np.flatnonzero((weight.detach() != old).any(dim=1).numpy())
        assert set(changed) <= set(rows)
        assert len(changed) > 0.9 * len(rows)
