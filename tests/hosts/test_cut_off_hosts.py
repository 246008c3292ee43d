"""A host is cut off the network, and comes back: nothing of its old state is believed, and its processes end.

Its worker is stopped for that time, so that it is there when the host comes back, however long the others take.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import msgspec
import pytest
from gba_hvd_tools.virtual_hosts import VirtualHosts

from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import HeartbeatMsg, Ok, PullDense, Refused, Save, SaveAbout, SaveSettings, SaveStatus
from recovery.catalog.claims import Claim
from recovery.config import Config
from tests.processes.cluster import wait_for

from .job import IMPATIENT, S3, HostsJob, hosts_job

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]
PATIENCE_S = 200.0
EPOCHS, SAMPLES = 4, 1000


def ask_to_save(line: Client, store: S3, claim: str, parent: str, generation: int) -> None:
    """Have the old server save what changed since `parent`, as the chief it knows would."""
    found = re.fullmatch(r"claims/(\d+)-(.+)\.([0-9a-f]{8})/.*", claim)
    assert found is not None
    epoch = int(found[1])
    line.call(
        0,
        Save(
            epoch=epoch, number=99, kind="delta", parent=parent, step=99, samples=99, part=0, n_parts=1,
            about=SaveAbout(), settings=SaveSettings(**store.settings, config=Config()), generation=generation,
            claim=Claim(epoch, found[2], found[3], lease_s=1.0),
        ),
        [b""],
    )  # fmt: skip


def latest_save(line: Client) -> SaveStatus | None:
    body = line.call(0, HeartbeatMsg(0, 0, 1, 0, 0)).body
    assert isinstance(body, Ok) and body.position is not None
    return body.position.saved


def no_save_is_running(line: Client) -> bool:
    """The one that the cut interrupted has ended: a server refuses a second save while one runs."""
    saved = latest_save(line)
    return saved is None or saved.state != "running"


def what_became_of_it(line: Client) -> SaveStatus | None:
    saved = latest_save(line)
    return saved if saved is not None and saved.number == 99 and saved.state != "running" else None


def generation_on(job: HostsJob, name: str) -> int:
    """Of the asynchronous mode that a host's server is in."""
    session = msgspec.msgpack.decode((job.folder_on(name) / "ps-0.session").read_bytes())
    return int(session["enter"]["generation"])


@pytest.mark.parametrize(
    ("mode", "recovery"),
    [
        ("allreduce", "partial"),
        pytest.param("gba", "partial", marks=pytest.mark.variant),
        pytest.param("allreduce", "full", marks=pytest.mark.variant),
    ],
)
def test_a_host_that_comes_back_is_not_believed(lab: VirtualHosts, tmp_path: Path, mode: str, recovery: str) -> None:
    """It is the host of the chief and of the coordinator."""
    store = S3(lab, tmp_path / "s3")
    checkpoint = {**store.settings, "every_steps": 3, "lease_s": 1.0, "recovery": recovery}
    plan = {"checkpoint": checkpoint, "epochs": EPOCHS, "gba": {"mode": mode}}
    holds = {1: "servers are there", 12: "go", 25: "came back"}
    with hosts_job(tmp_path / "job", lab, IMPATIENT, **plan, holds=holds) as job:
        job.start()
        job.wait_for_servers(PATIENCE_S)
        wait_for(lambda: job.ended or store.names("manifests/"), "a checkpoint", PATIENCE_S)
        assert not job.ended, job.log()
        cut = job.chief()
        (left,) = job.others(cut)
        claim = max(name for name in store.names("claims/") if name.endswith("/000000"))
        epoch = claim.removeprefix("claims/")[:6]
        (worker,) = job.processes_on(cut, only_workers=True)
        os.kill(worker, signal.SIGSTOP)
        lab.cut(cut)
        job.set_candidates([left])
        by_old_chief = store.names(f"manifests/{epoch}-")
        (job.out / "go").touch()
        kind = "resumed" if recovery == "full" else "rows_restored"
        wait_for(lambda: job.ended or job.events(kind), "the rows' return", PATIENCE_S)
        wait_for(lambda: job.ended or job.last_step() >= 25, "step 25", PATIENCE_S)
        assert not job.ended, job.log()

        lab.heal(cut)
        line = job.line_to_server_on(cut)
        line.start()
        try:
            wait_for(lambda: no_save_is_running(line), "the end of the save that the cut interrupted", PATIENCE_S)
            if mode == "allreduce":
                ask_to_save(line, store, claim, max(by_old_chief), 0)
                saved = wait_for(lambda: what_became_of_it(line), "the end of the save", PATIENCE_S)
                assert saved.state == "failed" and saved.facts.why.startswith("Fenced"), saved
            else:  # the old coordinator's save needs the other server, which has left that mode
                ask_to_save(line, store, claim, max(by_old_chief), generation_on(job, cut))
                now = generation_on(job, left)
                answer = line.send(0, PullDense(now, -1)).result(timeout=20).body
                assert isinstance(answer, Refused) and f"generation {now} is not served here" in answer.why
        finally:
            line.close()
        os.kill(worker, signal.SIGCONT)
        wait_for(lambda: not job.processes_on(cut), "the end of all that was on the host that came back", PATIENCE_S)
        (end,) = (line for line in job.notes("end") if line["pid"].startswith(f"{cut}-"))
        assert end["end"] == "FAILED" and "evicted while it was away" in end["error"]

        (job.out / "came back").touch()
        assert job.wait(PATIENCE_S) == 0, job.log()
        job.assert_nothing_left()
        assert set(store.names(f"manifests/{epoch}-")) <= set(by_old_chief)  # some have expired
        assert max(store.names("manifests/")) > f"manifests/{int(epoch) + 1:06d}-", "the others were to save"
        job.assert_samples(EPOCHS, SAMPLES)
        store.close()
