"""What a flood of connections without the key costs training: `python -m tests.processes.flood_server`.

A worker trains at a companion server, through its local socket: it leases, computes for some milliseconds, pushes. A
process of its own opens connections over so many seconds; each says nothing, or the greeting of the wire, and waits
to be cut off. Beside it, the same flood at a listener that takes connections and does nothing: what only opening them
costs a machine with few cores is no cost of the server. Rounds of the three alternate; printed are medians, and the
processor time of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import resource
import select
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
import psutil

from gba_hvd.ps import key_proof, tls
from gba_hvd.ps.messages import WIRES, Ok

from .fuzz_server import Host, Peer, done, enter, gradients, lease, push

N_SAMPLES = 1 << 30


def _client_hello() -> bytes:
    """What a TLS client begins with; it needs no key."""
    begins = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.context(bytes(32), False).wrap_bio(ssl.MemoryBIO(), begins).do_handshake()
    return begins.read()


GREETINGS = {
    "curve": b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + bytes(32),
    "plain": key_proof.hello(bytes(key_proof.NONCE_BYTES)),
    "tls": _client_hello(),
}
WAYS = ("nothing", "flood beside", "flood")


@dataclass(frozen=True)
class Round:
    """steps_s: micro-batches per second; server_s: processor time of the server for each; opened: connections."""

    steps_s: float
    server_s: float
    opened: int


def flood(port: int, greeting: bytes, n: int, seconds: float, ready: Event, opened: multiprocessing.Queue[int]) -> None:
    """Open n connections, evenly over the time; every other one begins a handshake. Each stays until it is cut off."""
    _raise_file_limit(n)
    open_ones: dict[int, socket.socket] = {}
    poller, count, began = select.epoll(), 0, time.monotonic()
    ready.set()
    while (now := time.monotonic()) - began < seconds:
        while count < n * (now - began) / seconds:
            try:
                one = socket.create_connection(("127.0.0.1", port), timeout=5)
                one.setblocking(False)
                if count % 2:
                    one.send(greeting)
            except OSError:
                break  # the queue is full: try again
            open_ones[one.fileno()] = one
            poller.register(one.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
            count += 1
        for number, _ in poller.poll(0.005):
            try:
                is_over = not open_ones[number].recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                is_over = True
            if is_over:
                poller.unregister(number)
                open_ones.pop(number).close()
    opened.put(count)


def take_all(listener: socket.socket, n: int) -> None:
    """Accept every connection and keep it: what the kernel does for any server."""
    _raise_file_limit(n)
    kept = []
    while True:
        kept.append(listener.accept()[0])


def measured(
    host: Host, peer: Peer, n: int, seconds: float, compute_s: float, way: str, request: int
) -> tuple[Round, int]:
    """One round; the number of the next request."""
    context = multiprocessing.get_context("spawn")
    ready, opened = context.Event(), context.Queue()
    children = []
    if way != "nothing":
        port = host.endpoints[0].control
        if way == "flood beside":
            listener = socket.create_server(("127.0.0.1", 0), backlog=100)
            port = listener.getsockname()[1]
            children.append(context.Process(target=take_all, args=(listener, n), daemon=True))
        children.append(
            context.Process(
                target=flood, args=(port, GREETINGS[host.endpoints[0].wire], n, seconds, ready, opened), daemon=True
            )
        )
        for child in children:
            child.start()
        ready.wait(120)
    server = psutil.Process(host.pid())
    frames, matrix = gradients(host.layout)[0], np.ones((256, 256), np.float32)
    before, began, n_done = sum(server.cpu_times()[:2]), time.monotonic(), 0
    while time.monotonic() - began < seconds:
        given = lease(peer, request, n_samples=N_SAMPLES)
        until = time.process_time() + compute_s
        while time.process_time() < until:
            matrix @ matrix
        assert push(peer, given, frames) == Ok()
        done(peer, given)
        request, n_done = request + 1, n_done + 1
    passed, used = time.monotonic() - began, sum(server.cpu_times()[:2]) - before
    count = opened.get(timeout=120) if way != "nothing" else 0
    for child in reversed(children):
        child.kill()
        child.join()
    return Round(n_done / passed, used / n_done, count), request


def _raise_file_limit(n: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard > 0 else n + 1000, hard))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compute-ms", type=float, default=10.0, help="of a micro-batch")
    parser.add_argument("--wire", choices=WIRES, default="curve")
    parser.add_argument("--out", type=Path, default=None, metavar="FILE.json")
    chosen = parser.parse_args(arguments)
    found: dict[str, list[Round]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as base:
        host = Host(Path(base), job="flood", wire=chosen.wire)
        try:
            peer, request = host.peer(), 1
            peer.ask(*enter(host.endpoints, n_samples=N_SAMPLES))
            for _ in range(chosen.rounds):
                for way in WAYS:
                    one, request = measured(
                        host, peer, chosen.connections, chosen.seconds, chosen.compute_ms / 1000, way, request
                    )
                    found[way].append(one)
                    each_ms = 1000 * one.server_s
                    text = f"{way:12} {one.steps_s:8.2f} micro-batches/s, the server {each_ms:.3f} ms of each"
                    print(f"{text}, {one.opened} connections", flush=True)
            rss = psutil.Process(host.pid()).memory_info().rss
        finally:
            host.close()
    rate = {way: statistics.median(one.steps_s for one in rounds) for way, rounds in found.items()}
    server = {way: statistics.median(one.server_s for one in rounds) for way, rounds in found.items()}
    result = {
        "cost": 1 - rate["flood"] / rate["flood beside"],
        "cost_with_the_flood_itself": 1 - rate["flood"] / rate["nothing"],
        "server_ms_per_micro_batch": {way: round(1000 * seconds, 3) for way, seconds in server.items()},
        "micro_batches_s": {way: round(one, 2) for way, one in rate.items()},
        "connections": statistics.median(one.opened for one in found["flood"]),
        "server_rss_mb": round(rss / 1e6, 1),
    }
    print(json.dumps(result, indent=1))
    if chosen.out:
        chosen.out.write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
