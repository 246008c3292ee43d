"""What the benchmarks compute from their runs, and what they say when a run fails. No launch of a real peer."""

from __future__ import annotations

import argparse
import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gba_hvd_tools.bench.allreduce import command as allreduce
from gba_hvd_tools.bench.allreduce.command import row_of
from gba_hvd_tools.bench.allreduce.shape import dense_dlrm
from gba_hvd_tools.bench.harness import dlrm, measure, process_memory
from gba_hvd_tools.bench.reader import command as reader

from gba_hvd.shm.sweep import orphaned_memory

SMAPS = """\
7f0000000000-7f0000004000 rw-s 00000000 00:19 7                          /dev/shm/job/shards
Size:                 16 kB
Rss:                  12 kB
Pss:                   6 kB
Pss_Dirty:             6 kB
7f0000004000-7f0000006000 rw-s 00004000 00:19 7                          /dev/shm/job/shards
Size:                  8 kB
Rss:                   8 kB
Pss:                   4 kB
7f0000010000-7f0000014000 rw-p 00000000 00:00 0
Size:                 64 kB
Rss:                  64 kB
Pss:                  64 kB
"""


def run_of(rank: int, seconds: float, **more: float) -> measure.Row:
    result = {"rank": rank, "seconds": seconds, "cpu_s": 1.0, "first_step_unix_s": 105.0 + rank}
    return {**result, "peak_own_bytes": 100 + rank, "loss_first": 0.7, "loss_last": 0.5 + rank / 10, **more}


def test_the_slowest_worker_makes_the_speed_of_a_run():
    row = row_of([run_of(0, 2.0), run_of(1, 4.0)], started=100.0, batch=10, steps=8)
    assert row["samples_per_s"] == 2 * 10 * 8 / 4.0
    assert row["ms_per_step"] == 500.0
    assert row["startup_s"] == 6.0
    assert row["peak_own_bytes"] == 101


def test_table_copies_are_the_proportional_shares_of_all_workers_over_one_copy():
    ranks = [run_of(r, 1.0, shared_bytes=1000, shared_proportional_bytes=505) for r in range(2)]
    assert row_of(ranks, started=0.0, batch=1, steps=1)["table_copies_per_host"] == 1.01


def test_runs_of_the_variants_alternate():
    variants = [measure.Variant(name, ()) for name in "ABC"]
    rows = measure.interleave(variants, 2, lambda variant, i: {"peer": variant.name, "run": i})
    assert "".join(row["peer"] for row in rows) == "ABCABC"


def test_a_variant_reads_as_the_command_a_person_would_type():
    assert str(measure.Variant("x", ("run", "a b"), {"THREADS": "1"})) == "THREADS=1 run 'a b'"


def test_a_failed_run_shows_the_first_traceback_not_the_launchers(tmp_path: Path):
    output = "noise\n" * 50 + "Traceback (most recent call last)\nboom\n" + "end\n" * 50
    code = f"import sys; print({output!r}); sys.exit(3)"
    with pytest.raises(measure.RunFailed, match=r"broken: exit status 3[\s\S]*\nTraceback .*\nboom\n"):
        measure.launch(measure.Variant("broken", (sys.executable, "-c", code)), [], log=tmp_path / "log", timeout_s=60)


@pytest.mark.slow
def test_a_run_that_takes_too_long_is_ended(tmp_path: Path):
    code = "import signal, sys; print('ready', flush=True); signal.pause()"
    with pytest.raises(measure.RunFailed, match="stuck: still running after 1 s"):
        measure.launch(measure.Variant("stuck", (sys.executable, "-c", code)), [], log=tmp_path / "log", timeout_s=1)


def test_shared_pages_are_distinguished_by_the_file_they_are_mapped_from():
    assert process_memory.shared_memory("/dev/shm/job", SMAPS) == {
        "shared_bytes": 24 << 10,
        "shared_resident_bytes": 20 << 10,
        "shared_proportional_bytes": 10 << 10,
    }


def test_touched_pages_are_resident(tmp_path: Path):
    path, size = tmp_path / "pages", 64 * mmap.PAGESIZE
    path.write_bytes(b"\1" * size)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), size):
        process_memory.touch(str(path))
        sizes = process_memory.shared_memory(str(path))
    assert sizes == dict.fromkeys(sizes, size)


def test_the_dense_model_interacts_every_pair_once():
    vectors = torch.randn(3, 4, 2)
    products = dlrm.Interaction(4)(vectors)
    expected = [[float(sample[i] @ sample[j]) for i in range(4) for j in range(i)] for sample in vectors]
    torch.testing.assert_close(products, torch.tensor(expected))
    model = dense_dlrm()
    assert model(torch.randn(3, dlrm.N_DENSE), torch.randn(3, dlrm.N_TABLES, dlrm.DIM)).shape == (3,)


@pytest.mark.parametrize("name", ["ours", "ours_micro", "ours_sync", "horovod", "dense"])
def test_every_horovod_peer_has_a_launch_with_one_thread_per_worker(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "console_script", lambda script: f"/bin/{script}")
    variant, n_processes = allreduce.variant_of(name)
    assert n_processes == 2
    assert variant.command[:5] == ("/bin/horovodrun", "-np", "2", "-H", "localhost:2")
    assert variant.env["OMP_NUM_THREADS"] == "1"


def test_the_result_needs_a_file_name(capsys: pytest.CaptureFixture[str]):
    from gba_hvd_tools.cli import main

    with pytest.raises(SystemExit, match="2"):
        main(["bench", "allreduce"])
    assert "--out" in capsys.readouterr().err


def test_what_a_slow_reader_costs_is_a_ratio_of_medians_to_a_fast_one():
    seconds = {"fast": (1.0, 2.0, 9.0), "loop": (4.0, 3.0, 5.0)}
    rows = [
        {"mode": mode, "data": "take", "reading": name, "seconds": factor * one}
        for mode, factor in (("allreduce", 1.0), ("gba", 3.0))
        for name, all_ in seconds.items()
        for one in all_
    ]
    found = reader.ratios(rows)
    assert found == {"allreduce take": {"fast": 1.0, "loop": 2.0}, "gba take": {"fast": 1.0, "loop": 2.0}}


def test_the_reader_benchmark_alternates_its_runs_and_wants_three_of_each(tmp_path: Path):
    args = argparse.Namespace(modes=["gba"], data=["take", "parquet"], step_ms=50.0, read=0.8, micro_batches=9)
    names = [variant.name for variant in reader.variants(args)]
    assert names == [f"gba {data} {name}" for data in ("take", "parquet") for name in reader.READING]
    args.rounds, args.out = 2, tmp_path / "out.json"
    assert reader.run(args) == 1
    assert not args.out.exists()


@pytest.mark.slow
def test_a_job_that_starts_meanwhile_does_not_remove_the_memory_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = []

    def launch(_: Any, more: list[str], **__: Any) -> float:
        memory = Path(more[more.index("--memory") + 1])
        assert memory.is_dir() and memory.parent == tmp_path
        found.append(orphaned_memory(tmp_path, semaphores=tmp_path))
        raise measure.RunFailed("as planned")

    monkeypatch.setattr(allreduce, "Config", lambda: SimpleNamespace(shard_dir=tmp_path))
    monkeypatch.setattr(measure, "launch", launch)
    with pytest.raises(measure.RunFailed, match="as planned"):
        allreduce.Launches(tmp_path / "scratch", "dlrm", 8, steps=1, hosts=2, timeout_s=1.0).run("ours")
    assert found == [[]]
