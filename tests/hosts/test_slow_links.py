"""Links of 100 Mbit/s: training and switching are slower, and nobody is taken for dead."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gba_hvd_tools.bench.harness import measure, two_hosts
from gba_hvd_tools.bench.harness.emulated_accelerators import SlowLink
from gba_hvd_tools.virtual_hosts import VirtualHosts

from .job import hosts_job

pytestmark = [pytest.mark.processes]
EPOCHS, SAMPLES = 4, 1000


@pytest.mark.variant
def test_slow_links_make_nobody_dead(lab: VirtualHosts, tmp_path: Path) -> None:
    lab.limit("100mbit")
    there_and_back = {"mode": "allreduce", "switch_at": {3: "gba", 20: "allreduce"}}
    environ = {"GBA_HVD_ALIVE_S": "2"}
    # Nobody dies, so nobody needs to be given up soon.
    with hosts_job(
        tmp_path / "job", lab, environ, gloo_timeout_s=60, gba=there_and_back, epochs=EPOCHS, global_batch=192
    ) as job:
        job.start()
        assert job.wait(300) == 0, job.log()
        job.assert_nothing_left()
        job.assert_samples(EPOCHS, SAMPLES)
        switches = [(line["from"], line["to"]) for line in job.events("switch")]
        assert switches.count(("allreduce", "gba")) == switches.count(("gba", "allreduce")) == 2, (
            "each worker, each way"
        )
        assert not job.events("membership") and job.result()["restarts"] == 0
        sent = {name: lab.sent_bytes(name) for name in job.hosts}
        assert all(n_bytes > 100_000 for n_bytes in sent.values()), "the job was to go through these links"


def test_a_limit_lets_no_more_pass_at_once_than_was_asked_for(lab: VirtualHosts) -> None:
    lab.limit("28mbit", burst_bytes=4000, queue_ms=1000)
    show = lab.popen("h1", ["tc", "-json", "qdisc", "show", "dev", "eth0"], stdout=subprocess.PIPE)
    (found,) = json.loads(show.communicate(timeout=20)[0])
    options = found["options"]
    assert options["rate"] == 28e6 / 8 and options["burst"] == pytest.approx(4000, rel=0.01)


# Instead of a job: says that it has begun, sees its link become slow and fast again, and ends.
_SEES_THE_LINK = """
import subprocess, sys, time
from pathlib import Path
result, started = (Path(sys.argv[sys.argv.index(name) + 1]) for name in ("--result", "--started"))
started.touch()
for is_slow in eval(sys.argv[1]):
    while is_slow != (b"tbf" in subprocess.check_output(["tc", "qdisc", "show", "dev", "eth0"])):
        time.sleep(0.01)
Path("/dev/shm/of-the-desk").touch()
result.write_text('{"ended": true}')
"""


@pytest.mark.usefixtures("_hosts_possible")
def test_a_benchmark_limits_the_link_of_its_hosts_for_a_while(tmp_path: Path) -> None:
    contestant = measure.Variant("contestant", (sys.executable, "-c", _SEES_THE_LINK, "(True, False)"))
    row = two_hosts.result_of(contestant, [], tmp_path, 60.0, SlowLink("28mbit", from_s=0.0, to_s=0.5))
    assert row["ended"] and len(row["link_changes_s"]) == 2
    assert_nothing_left(tmp_path)


@pytest.mark.usefixtures("_hosts_possible")
def test_a_benchmark_that_ends_while_its_link_is_slow_has_failed(tmp_path: Path) -> None:
    contestant = measure.Variant("contestant", (sys.executable, "-c", _SEES_THE_LINK, "(True,)"))
    with pytest.raises(measure.RunFailed, match="to be slow from 0 s to 3600 s, and changed at"):
        two_hosts.result_of(contestant, [], tmp_path, 60.0, SlowLink("28mbit", from_s=0.0, to_s=3600.0))
    assert_nothing_left(tmp_path)


def assert_nothing_left(folder: Path) -> None:
    assert not list(folder.glob("hosts-*")) and not Path("/dev/shm/of-the-desk").exists()
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            assert str(folder).encode() not in cmdline.read_bytes()
