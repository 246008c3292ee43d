"""The examples of docs/EXTENDING.md that change the package, in a copy of it; and a job with registered classes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gba_hvd.faults import FaultSchedule
from recovery import Config, ProcessCheckpointer, open_store
from recovery.format.manifest import from_json
from recovery.storage.store import manifest_names
from recovery.testing import train, two_tables
from tests.distributions import install
from tests.extending import ROOT, Example, examples

from .cluster import GRACE_S, cluster, wait_for

pytestmark = [pytest.mark.processes]


@pytest.mark.parametrize("example", [e for e in examples().values() if e.edits], ids=lambda example: example.title)
def test_a_change_of_the_package_works_in_a_copy_of_it(example: Example, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    example.edit_copy(copy)
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("HOROVOD", "GBA_HVD"))}
    environ |= {
        "PYTHONPATH": str(copy),
        "OMP_NUM_THREADS": "1",
        "GBA_HVD_SHARD_DIR": str(tmp_path / "shm"),
        "GBA_HVD_GRACE_S": str(GRACE_S),
    }
    script = example.script(tmp_path)
    succeeds([script], environ, tmp_path)
    wait_for(lambda: not list((tmp_path / "shm").glob("gba-hvd-*")), "the end of the job's memory")


def succeeds(arguments: list[str | Path], environ: dict[str, str], folder: Path) -> None:
    """Run Python in this folder."""
    run = subprocess.run(
        [sys.executable, *arguments], env=environ, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]


def test_the_tests_of_modes_pass_with_the_mode_of_the_page_until_they_read_documents(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    examples()["An asynchronous mode"].edit_copy(copy)
    shutil.copytree(ROOT / "tests", copy / "tests")
    shutil.copy(ROOT / "pyproject.toml", copy)
    environ = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    checked = "tests/unit/test_mode_names.py", "tests/unit/switching/test_callback.py"
    chosen = "-m", "not slow", "-k", "not documents and not docstrings"
    succeeds(["-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, *checked], environ, copy)


# What the examples of the page do, and each process that does it leaves a file with its number.
MODULE = """
import os
from dataclasses import dataclass
from pathlib import Path

import {weighting}, {rule}, {rows}


def trace(what):
    Path(os.environ["TEST_TRACE"], f"{{what}}-{{os.getpid()}}").touch()


class Weighting({weighting}.Exponential):
    def weight(self, staleness):
        trace("weighting")
        return super().weight(staleness)


class Rule({rule}.AgeDamped):
    def stepped(self, *args):
        trace("rule")
        super().stepped(*args)


@dataclass(frozen=True)
class Rows({rows}.RowMomentum):
    def update_(self, *args):
        trace("rows")
        super().update_(*args)
"""


def installed(folder: Path) -> Path:
    """The page's store and policy, and a distribution that registers a weighting, a rule and a row optimizer."""
    page = examples()
    for title in ("A checkpoint store", "A save policy"):
        page[title].install(folder)
    modules = {}
    for title in ("A staleness weighting", "An update rule", "A row optimizer"):
        modules |= page[title].modules
    weighting, rule, rows = (name.removesuffix(".py") for name in modules)
    install(
        folder,
        "traced",
        {
            "gba_hvd.staleness_weightings": {"traced_weighting": "traced:Weighting"},
            "gba_hvd.update_rules": {"traced_rule": "traced:Rule"},
            "gba_hvd.row_optimizers": {"traced_rows": "traced:Rows"},
        },
        modules | {"traced.py": MODULE.format(weighting=weighting, rule=rule, rows=rows)},
    )
    return folder


def test_servers_train_with_what_a_distribution_registers_also_those_that_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    environ = {"PYTHONPATH": str(installed(tmp_path / "site-packages")), "TEST_TRACE": str(trace)}
    faults = [fault.entry() for fault in FaultSchedule().kill_server(host=0, at_step=5).faults]
    gba = {"mode": "gba", "staleness": "traced_weighting", "rule": "traced_rule", "required": True}
    place = f"sqlite://{tmp_path}/checkpoints.db"
    checkpoint = {"url": place, "policy": "busiest", "every_steps": 2, "keep_last": 50}
    with cluster(
        tmp_path / "job", environ, gba=gba, row_optimizer="traced:Rows", checkpoint=checkpoint,
        fault_schedule=faults, epochs=1, sleep_s=0.1,
    ) as job:  # fmt: skip
        job.run(lambda: job.start_static(2))
        assert job.schedule_fired() == ["kill_server"]
        job.assert_every_sample_once(epochs=1)
        workers = {line["pid"].rpartition("-")[2] for line in job.notes("committed")}
        assert len(workers) == 2
        assert all(np.isfinite(array).all() for array in job.arrays().values())
        assert job.result()["dropped"] == 0, "this weighting drops nothing"
    for what in ("weighting", "rule", "rows"):
        servers = {path.name.rpartition("-")[2] for path in trace.glob(f"{what}-*")} - workers
        assert len(servers) == 2, f"{what}: the server and its successor"
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    assert "registered:busiest" in kinds_of(place)[:-1] and kinds_of(place)[-1] == "full", "the last leaves out nothing"


def kinds_of(place: str) -> list[str]:
    """Of all checkpoints there, oldest first."""
    store = open_store(place)
    return [from_json(store.get(name), name).kind for name in manifest_names(store)]


def test_a_saving_process_finds_the_registered_store_and_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(installed(tmp_path / "site-packages")))
    place, rows = f"sqlite://{tmp_path}/checkpoints.db", two_tables(2, shared=True)
    with ProcessCheckpointer(place, rows, Config(policy="busiest", row_fraction=0.02)) as checkpoints:
        for step in (2, 4):
            train(rows, 2, seed=1)
            checkpoints.save(step, 10 * step, {"lr": 0.5}).result(120)
    assert kinds_of(place) == ["full", "registered:busiest"]
