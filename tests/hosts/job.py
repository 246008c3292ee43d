"""A job on several hosts: `horovodrun` on the desk, which reaches the other hosts by ssh; and a look at their memory.

Hosts come and go by the launcher's discovery script: one is a candidate while its sshd answers. What the job leaves is
looked for on every host that is on, and is part of `assert_nothing_left`.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gba_hvd_tools.virtual_hosts import VirtualHosts

from gba_hvd.ps.client import Client
from gba_hvd.ps.messages import Endpoint
from gba_hvd.shm.checkpoint_rows import ShardRows
from gba_hvd.shm.layout import Layout
from gba_hvd.shm.shard_memory import ShardMemory
from recovery.restore import Report, TrainingPoint, restore
from recovery.storage.store import Store
from tests.processes.cluster import END_S, HOROVODRUN, Cluster, wait_for
from tests.processes.workload import digests, digests_of

DESK = "desk"
# A lost host is noticed soon; but not so soon that one that is only not scheduled for a while is given up.
IMPATIENT = {"GBA_HVD_SERVER_S": "15", "GBA_HVD_ALIVE_S": "2"}
GLOO_TIMEOUT_S = 15
T = TypeVar("T")
_S3_PORT = 5000
_DISCOVER = """#!/bin/bash
for host in $(cat {hosts}); do
  (timeout 10 bash -c "exec 3<>/dev/tcp/$host/22" 2>/dev/null && echo $host:1) &
done
wait
"""


@dataclass
class HostsJob(Cluster):
    """`lab` must have the desk and the hosts for workers; each of them runs one."""

    lab: VirtualHosts = field(kw_only=True)
    gloo_timeout_s: int = field(default=GLOO_TIMEOUT_S, kw_only=True)

    def __post_init__(self) -> None:
        self.plan = {"shard_dir": "/dev/shm", **self.plan}
        super().__post_init__()
        self.hosts: list[str] = [name for name in self.lab.names if name != DESK]

    def start(self, hosts: list[str] | None = None, min_np: int = 1) -> None:
        """Launch workers on these hosts, by default on all."""
        self.set_candidates(hosts or self.hosts)
        script = self.folder / "discover.sh"
        script.write_text(_DISCOVER.format(hosts=self.hosts_file))
        script.chmod(0o755)
        workers = ["-np", len(hosts or self.hosts), "--min-np", min_np, "--max-np", len(self.hosts)]
        elastic = ["--host-discovery-script", script, "--blacklist-cooldown-range", 1, 2]
        network = ["--network-interface", "eth0", "--gloo-timeout-seconds", self.gloo_timeout_s]
        self._launch([HOROVODRUN, *workers, *elastic, *network])

    def set_candidates(self, hosts: list[str]) -> None:
        """The hosts that the launcher may use, as far as they are there."""
        fresh = self.hosts_file.with_suffix(".new")
        fresh.write_text("\n".join(hosts))
        fresh.rename(self.hosts_file)

    def python(self) -> list[str]:
        """Each worker starts from nothing, on its host."""
        return [sys.executable]

    def popen(self, command: list[str], **settings: Any) -> subprocess.Popen[bytes]:
        return self.lab.popen(DESK, command, **settings)

    def end(self) -> None:
        """The hosts end with the lab; the launcher runs on one of them."""
        if self.launcher is not None:
            self.lab.signal(self.launcher, signal.SIGKILL)
            self.launcher.wait(10)

    # --- what is there -----------------------------------------------------------------------------------------------

    def processes(self, only_workers: bool = False) -> list[int]:
        return [pid for name in self.lab.names for pid in self.processes_on(name, only_workers)]

    def processes_on(self, name: str, only_workers: bool = False) -> list[int]:
        found = self.lab.processes(name)
        mine = {pid: command for pid, command in found.items() if "s3_server.py" not in command}
        return [pid for pid, command in mine.items() if not only_workers or _is_worker(command)]

    def assert_nothing_left(self) -> None:
        """On no host that is on runs anything, and their shard memory is empty, soon after the end."""
        self.assert_nothing_left_but_memory()
        for name in filter(self.lab.is_on, self.hosts):
            left = list((self.lab.files(name) / "dev/shm").iterdir())
            assert not left, f"shard memory is left on {name}: {left}"

    def assert_nothing_left_but_memory(self) -> None:
        wait_for(lambda: not self.processes(), "the end of the job's processes", END_S)

    def wait_for_servers(self, timeout_s: float) -> None:
        """Wait for a companion server on each host; the workers hold their step until then."""

        def there() -> bool:
            found = [list((self.lab.files(name) / "dev/shm").glob("gba-hvd-*/ps-0.address")) for name in self.hosts]
            return self.ended or all(found)

        wait_for(there, "the servers", timeout_s)
        assert not self.ended, self.log()
        (self.out / "servers are there").touch()

    def folder_on(self, name: str) -> Path:
        """The job's folder on a host."""
        (folder,) = (self.lab.files(name) / "dev/shm").glob("gba-hvd-*")
        return Path(folder)

    def shards_on(self, name: str) -> dict[int, str]:
        """Digests of the shards in a host's memory, as they are now."""
        with _mapped(self.folder_on(name)) as memory:
            return digests(memory)

    def line_to_server_on(self, name: str) -> Client:
        """A line to the companion server of a host, as its workers have it; also while the host is cut off."""
        folder = self.folder_on(name)
        settings, key = json.loads((folder / "ps.json").read_text()), (folder / "key").read_bytes()
        return Client(settings["job"], key, [Endpoint(1, 0, "", 0, 0)], 1, folder, timeout_s=10.0)

    def shards_in(self, store: Store, name: str, scratch: Path) -> dict[int, str]:
        """Digests of all shards as the newest checkpoint has them. name: a host, for the tables' layout."""
        rows, _ = self.restored(store, name, scratch)
        return digests_of(rows, rows.shards())

    def restored(
        self, store: Store, name: str, scratch: Path, shards: Sequence[int] | None = None
    ) -> tuple[ShardRows, Report]:
        """These shards (None: all) out of the newest checkpoint. name: a host, for the tables' layout."""
        with _mapped(self.folder_on(name)) as memory:
            layout = memory.layout
        scratch.mkdir(mode=0o700)
        with open(scratch / "shards", "wb") as file:
            file.truncate(layout.n_bytes)
        mine = range(layout.n_shards) if shards is None else shards
        rows = ShardRows(ShardMemory.attach(scratch, layout), lambda: mine, filling=True)
        report = restore(store, rows, now=TrainingPoint(0, 0, 1), with_state=False)
        assert report is not None
        return rows, report

    # --- what the workers wrote --------------------------------------------------------------------------------------

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [line for line in self.notes("event") if line["event"] == kind]

    def chief(self) -> str:
        """The host of rank 0, in the newest world."""
        return str([line for line in self.notes("job") if line["rank"] == 0][-1]["host"])

    def assert_samples(self, epochs: int, samples: int) -> None:
        """Every sample was computed in every epoch, and the account has each once."""
        for epoch in range(epochs):
            assert self.samples_of_epoch(epoch) == list(range(samples)), f"epoch {epoch}"
        result = self.result()
        assert result["total"] == result["applied"] + result["dropped"] + result["lost"] == epochs * samples

    def others(self, *names: str) -> list[str]:
        return [name for name in self.hosts if name not in names]


def quiet(look: Callable[[], T], what: str, timeout_s: float = 30.0) -> T:
    """What a look shows as soon as it shows the same for a second."""
    seen = [look()]

    def again() -> bool:
        time.sleep(0.2)
        seen.append(look())
        return len(seen) > 5 and all(one == seen[-1] for one in seen[-6:])

    wait_for(again, f"{what} to stay as they are", timeout_s)
    return seen[-1]


class S3:
    """An S3 server on the desk, with an empty bucket, that the hosts of a lab reach by its network."""

    def __init__(self, lab: VirtualHosts, folder: Path) -> None:
        folder.mkdir()
        self._lab = lab
        command = [
            sys.executable,
            str(Path(__file__).with_name("s3_server.py")),
            str(_S3_PORT),
            "bucket",
            folder / "up",
        ]
        with open(folder / "log", "wb") as log:
            self.process = lab.popen(DESK, command, stdout=log, stderr=log)
        wait_for(lambda: self.process.poll() is not None or (folder / "up").exists(), "the S3 server", 120.0)
        assert self.process.poll() is None, (folder / "log").read_text()
        address = f"http://{lab.address(DESK)}:{_S3_PORT}"
        options = {"key": "test", "secret": "test", "endpoint_url": address}
        self.settings = {"url": "s3://bucket/job", "storage_options": {**options, "timeout_s": 10, "tries": 2}}
        self._list = f"{address}/bucket?list-type=2&prefix=job/"

    def names(self, prefix: str) -> list[str]:
        """Of the objects that are there, as the server lists them."""
        look = f"import sys, urllib.request as r; print(r.urlopen({self._list + prefix!r}, timeout=10).read().decode())"
        listed = self._lab.popen(DESK, [sys.executable, "-I", "-S", "-c", look], stdout=subprocess.PIPE)
        words, _ = listed.communicate(timeout=20)
        return re.findall("<Key>job/(.*?)</Key>", words.decode())

    def close(self) -> None:
        self._lab.signal(self.process, signal.SIGKILL)
        self.process.wait(10)


@contextlib.contextmanager
def hosts_job(
    folder: Path,
    lab: VirtualHosts,
    environ: dict[str, str] | None = None,
    gloo_timeout_s: int = GLOO_TIMEOUT_S,
    **plan: Any,
) -> Iterator[HostsJob]:
    """gloo_timeout_s: for so long a worker waits for another, also for one that is starting."""
    job = HostsJob(folder, plan, environ or {}, lab=lab, gloo_timeout_s=gloo_timeout_s)
    try:
        yield job
    finally:
        job.end()


@contextlib.contextmanager
def _mapped(folder: Path) -> Iterator[ShardMemory]:
    about = json.loads((folder / "memory.json").read_text())
    about.pop("format")
    yield ShardMemory.attach(folder, Layout.of_description(about))


def _is_worker(command: str) -> bool:
    return "worker.py" in command and "python" in command.split()[0]
