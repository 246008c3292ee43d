"""Several hosts on one Linux machine, for tests and benchmarks: each has its own network, name, processes and /dev/shm.

    with VirtualHosts(folder, ("desk", "h1", "h2")) as lab:
        lab.limit("100mbit")
        job = lab.popen("desk", ["horovodrun", "--network-interface", "eth0", "-np", "2", "-H", "h1:1,h2:1", ...])
        lab.cut("h2"); lab.heal("h2"); lab.kill("h2")

A host is a process (a shell) in network, host name, mount and process namespaces of its own, with an sshd that the
other hosts reach by name. All hosts are joined by a bridge, in a network namespace of its own, too. Files are the
machine's, except /dev/shm, /run and /etc/hosts.

Who owns what. Nothing here has a name outside: the namespaces live as long as their first process, the links and the
bridge as long as the namespaces, and each first process lives as long as a pipe that this process holds. So the kernel
removes all of it however this process ends. What is left on disk is in `folder`.

Needs root, iproute2, util-linux and openssh-server; `missing()` says what is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NETWORK = "10.77.0"
_START_TIMEOUT_S, _END_TIMEOUT_S = 20.0, 10.0
_NEEDED = {
    "unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2", "tc": "iproute2", "bash": "bash",
    "ssh": "openssh-client", "ssh-keygen": "openssh-client", "sshd": "openssh-server",
}  # fmt: skip
_RATE = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>[kmg]bit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_UNSHARED = ["--net", "--uts", "--mount", "--ipc", "--pid", "--fork", "--mount-proc"]

# What a host's first process does. It reaps what its children leave, as an init must, and ends with its input.
_BOOT = """
hostname "$1" && mount --bind "$2/hosts" /etc/hosts && mount -t tmpfs -o size=2g tmpfs /dev/shm &&
mount -t tmpfs tmpfs /run && mkdir /run/sshd && ip link set lo up && "$3" -f "$2/sshd_config" -E "$2/$1.sshd.log" &&
touch "$2/$1.up" && while read -r _; do :; done
"""


class VirtualHostsError(Exception):
    """The hosts cannot be made; the message says why."""


def missing() -> str:
    """Why there can be no hosts here, in words; empty if there can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    lacking = {package for program, package in _NEEDED.items() if _program(program) is None}
    if lacking:
        return f"these packages are not installed: {' '.join(sorted(lacking))}"
    try:
        _run("unshare", *_UNSHARED, "true")
    except VirtualHostsError as error:
        return f"no namespaces can be made here: {error}"
    return ""


@dataclass
class _Host:
    number: int
    address: str
    process: subprocess.Popen[bytes]  # unshare; the host's first process is its child
    init: int  # that child


class VirtualHosts:
    """Enter it to have the hosts, leave it to have none. Not thread-safe.

    folder: for keys, settings and logs; must not exist, or be empty. names: of the hosts
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        if len(set(names)) != len(names) or not all(re.fullmatch(r"[a-z][a-z0-9-]{0,14}", name) for name in names):
            raise ValueError(f"hosts need different names of lower case letters, digits and '-', got {list(names)}")
        self.folder, self.names = folder.resolve(), tuple(names)
        self._hosts: dict[str, _Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._rate: str | None = None
        self._burst_bytes: int | None = None
        self._queue_ms = 0.0

    def __enter__(self) -> VirtualHosts:
        if reason := missing():
            raise VirtualHostsError(reason)
        try:
            self._write_settings()
            self._switch = _held([str(_program("unshare")), "--net", "cat"], self.folder / "switch.log")
            _wait(lambda: _has_own_network(self._switch_pid), "the switch")
            self._at_switch("ip", "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            self._at_switch("ip", "link", "set", "bridge", "up")
            for name in self.names:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and everything on them. May be called twice."""
        for name in list(self._hosts):
            self._end(name)
        if self._switch is not None:
            _end_held(self._switch)
            self._switch = None

    # --- hosts -------------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Switch a host on, at first or after `kill`."""
        if name in self._hosts:
            raise VirtualHostsError(f"host {name} is on already")
        number = self.names.index(name) + 1
        up = self.folder / f"{name}.up"
        up.unlink(missing_ok=True)
        sshd = str(_program("sshd"))
        boot = ["bash", "-c", _BOOT, "host", name, str(self.folder), sshd]
        process = _held([str(_program("unshare")), *_UNSHARED, *boot], self.folder / f"{name}.log")
        try:
            init = _wait(lambda: _child(process.pid), f"the first process of host {name}", process)
            self._hosts[name] = host = _Host(number, f"{_NETWORK}.{number}", process, init)
            _wait(lambda: _has_own_network(init), f"the network of host {name}", process)
            _wait(up.exists, f"host {name} (see {self.folder}/{name}*.log)", process)
        except BaseException:
            _end_held(process)
            self._hosts.pop(name, None)
            raise
        self._at_switch("ip", "link", "add", f"p{number}", "type", "veth", "peer", "name", "eth0", "netns", str(init))
        self._in(host, "ip", "link", "set", "eth0", "address", f"02:00:0a:4d:00:{number:02x}")  # the same each time
        self._in(host, "ip", "addr", "add", f"{host.address}/24", "dev", "eth0")
        self._in(host, "ip", "link", "set", "eth0", "up")
        self._at_switch("ip", "link", "set", f"p{number}", "master", "bridge", "up")
        if self._rate is not None:
            self._limit(host, self._rate)

    def cut(self, name: str) -> None:
        """Take a host off the network. It continues and notices nothing but silence."""
        self._at_switch("ip", "link", "set", f"p{self._hosts[name].number}", "nomaster")

    def heal(self, name: str) -> None:
        """Bring it back to the network."""
        self._at_switch("ip", "link", "set", f"p{self._hosts[name].number}", "master", "bridge")

    def kill(self, name: str) -> None:
        """Switch a host off. No process says goodbye, and the network does not notice."""
        self.cut(name)
        self._end(name)

    def limit(self, rate: str | None, burst_bytes: int | None = None, queue_ms: float = 50) -> None:
        """Let each host send, and receive, at most so much: "100mbit", "1gbit"; None lifts it.

        burst_bytes: that pass at once after a pause; None: 5 ms of the rate, 128 kB at least
        queue_ms: what would wait for longer is dropped
        """
        if rate is not None and _RATE.fullmatch(rate) is None:
            raise ValueError(f"a rate is a number and kbit, mbit or gbit, as in '100mbit', got {rate!r}")
        self._rate, self._burst_bytes, self._queue_ms = rate, burst_bytes, queue_ms
        for host in self._hosts.values():
            self._limit(host, rate)

    def sent_bytes(self, name: str) -> int:
        """Bytes of Ethernet frames that a host has sent so far, by the counter of its interface."""
        port = f"p{self._hosts[name].number}"
        (link,) = json.loads(self._at_switch("ip", "-json", "-statistics", "link", "show", "dev", port))
        sent: int = link["stats64"]["rx"]["bytes"]  # seen from the switch
        return sent

    # --- on a host ---------------------------------------------------------------------------------------------------

    def popen(self, name: str, command: Sequence[str | Path], **settings: Any) -> subprocess.Popen[bytes]:
        """Start a command on a host; settings are Popen's. Signals for it go to `signal`, its end is the Popen's."""
        settings.setdefault("env", dict(os.environ))
        settings["env"] = settings["env"] | {"PATH": f"{self.folder / 'bin'}:{settings['env'].get('PATH', '')}"}
        settings.setdefault("stdin", subprocess.DEVNULL)
        folder = settings.pop("cwd", self.folder)
        enter = ["bash", "-c", 'cd "$0" && exec "$@"', str(folder)]
        return subprocess.Popen([*self._enter(self._hosts[name]), *enter, *map(str, command)], **settings)

    def signal(self, process: subprocess.Popen[bytes], number: signal.Signals) -> None:
        """Send a signal to what `popen` started."""
        child = _child(process.pid)
        if child:
            os.kill(child, number)

    def processes(self, name: str) -> dict[int, str]:
        """Command lines of what runs on a host, without its sshd, by process number as seen from here."""
        if name not in self._hosts:
            return {}
        init, found = self._hosts[name].init, {}
        space = os.stat(f"/proc/{init}/ns/pid").st_ino
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or int(entry.name) == init or os.stat(entry / "ns/pid").st_ino != space:
                    continue
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if command and not command.startswith("sshd:"):  # one without a command line is a zombie
                    found[int(entry.name)] = command
        return found

    def files(self, name: str) -> Path:
        """The root of a host's file system, as seen from here: `files("h1") / "dev/shm"`."""
        return Path(f"/proc/{self._hosts[name].init}/root")

    def is_on(self, name: str) -> bool:
        return name in self._hosts

    def address(self, name: str) -> str:
        """IPv4 address of a host."""
        return f"{_NETWORK}.{self.names.index(name) + 1}"

    # -----------------------------------------------------------------------------------------------------------------

    def _write_settings(self) -> None:
        folder = self.folder
        (folder / "bin").mkdir(parents=True)
        for key in ("host_key", "key"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "lab", "-f", str(folder / key))
        hosts = [f"{self.address(name)} {name}\n" for name in self.names]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host_key\nAuthorizedKeysFile {folder}/key.pub\nStrictModes no\nUsePAM no\n"
            "PermitRootLogin prohibit-password\nPasswordAuthentication no\nPrintMotd no\nMaxStartups 100\n"
            "PidFile none\nUseDNS no\n"
        )
        (folder / "ssh_config").write_text(  # a launcher must notice that a host is gone
            f"IdentityFile {folder}/key\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nBatchMode yes\n"
            "LogLevel ERROR\nConnectTimeout 3\nServerAliveInterval 1\nServerAliveCountMax 3\n"
        )
        ssh = folder / "bin" / "ssh"  # first in PATH of all that `popen` starts
        ssh.write_text(f'#!/bin/sh\nexec {_program("ssh")} -F {folder}/ssh_config "$@"\n')
        ssh.chmod(0o755)

    def _limit(self, host: _Host, rate: str | None) -> None:
        for run, device in ((self._in, "eth0"), (lambda _, *c: self._at_switch(*c), f"p{host.number}")):
            if rate is None:
                with contextlib.suppress(VirtualHostsError):  # there was no limit
                    run(host, "tc", "qdisc", "del", "dev", device, "root")
                continue
            number, unit = float(_RATE.fullmatch(rate)["number"]), _RATE.fullmatch(rate)["unit"]  # type: ignore[index]
            # What may pass between two ticks of the kernel
            burst = self._burst_bytes or max(128_000, int(number * _BITS[unit] / 8 / 200))
            words = f"tc qdisc replace dev {device} root tbf rate {rate} burst {burst} latency {self._queue_ms:g}ms"
            run(host, *words.split())

    def _enter(self, host: _Host) -> list[str]:
        spaces = ["--net", "--uts", "--mount", "--ipc", "--pid"]
        return [str(_program("nsenter")), "--target", str(host.init), *spaces, "--"]

    def _in(self, host: _Host, *command: str) -> str:
        return _run(*self._enter(host), *command)

    def _at_switch(self, *command: str) -> str:
        return _run("nsenter", "--target", str(self._switch_pid), "--net", "--", *command)

    @property
    def _switch_pid(self) -> int:
        assert self._switch is not None, "the lab is not entered"
        return self._switch.pid

    def _end(self, name: str) -> None:
        host = self._hosts.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.kill(host.init, signal.SIGKILL)  # and with it all other processes of the namespace
        _end_held(host.process)
        if self._switch is not None:
            with contextlib.suppress(VirtualHostsError):  # the kernel takes its time; or it has gone already
                self._at_switch("ip", "link", "del", f"p{host.number}")


def _held(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends, at the latest, when this one does: it reads from a pipe that only this one holds."""
    with open(log, "ab") as words:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=words, stderr=words, start_new_session=True)


def _end_held(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_END_TIMEOUT_S)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin:/usr/bin:/bin")


def _run(program: str, *rest: str) -> str:
    path = _program(program)
    command = [str(path), *rest]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False)
    if done.returncode:
        raise VirtualHostsError(f"{program} {' '.join(rest)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _child(pid: int) -> int:
    """The first child of a process, or 0."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return 0
    return int(children[0]) if children else 0


def _has_own_network(pid: int) -> bool:
    """Whether a process has left this one's namespace."""
    with contextlib.suppress(FileNotFoundError):
        return os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino
    return False


def _wait(condition: Any, what: str, process: subprocess.Popen[bytes] | None = None) -> Any:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not (value := condition()):
        if process is not None and process.poll() is not None:
            raise VirtualHostsError(f"{what} did not come up: its first process ended with status {process.returncode}")
        if time.monotonic() > deadline:
            raise VirtualHostsError(f"waited {_START_TIMEOUT_S:.0f} s without success for {what}")
        time.sleep(0.01)
    return value
