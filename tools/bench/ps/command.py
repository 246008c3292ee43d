"""`gba-hvd bench ps`: rows/s of pulls and pushes through sockets, as from another host, with 1 and 2 servers.

One client asks for distinct rows of one table, uniformly drawn: pulls one after the other, pushes one after the other,
and a pull and a push of the same rows in turn, which count once. With --in-flight N it waits for a push only when N are
on the way, so that a pull waits for none, as in a job, where N is 2; of the servers that answer as many bytes, whose
answers come in the order of requests, a pull waits for all. Beside ours, with each wire: a table server on
`torch.distributed.rpc`, and servers that answer as many bytes and do nothing, through the sockets that ours uses with
that wire. Of ours also the time of a lease, median and 99th percentile, while another process pulls and pushes. Every
run is a fresh launch; runs of the contestants alternate.

Rows in the result file are kept and their runs not done again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..harness import measure, noise, resumable
from ..harness.measure import Row, Subparsers, Variant

CONTESTANTS = {
    "ours": "the companion servers, through TCP on the loopback interface, encrypted: wire curve",
    "ours_tls": "the same with TLS: wire tls",
    "ours_bf16": "wire curve, rows and their gradients as bfloat16, never bypassed (row_compression=bf16.always())",
    "ours_tls_bf16": "wire tls, rows and their gradients as bfloat16",
    "ours_plain": "the same as ours, not encrypted: wire plain",
    "rpc": "rpc_server.TableServer: index_select, index_add_ behind torch.distributed.rpc, TCP as between hosts",
    "zmq_curve": "ZeroMQ DEALER and ROUTER over TCP with CURVE, as with wire curve: as many bytes both ways, no table",
    "tls_echo": "as many bytes there and back through the sockets of wire tls",
    "plain_echo": "the same through those of wire plain",
}
WIRES = ("curve", "tls", "plain")
OF_WIRE = {
    "ours": "curve", "ours_bf16": "curve", "zmq_curve": "curve", "ours_tls": "tls", "ours_tls_bf16": "tls",
    "tls_echo": "tls", "ours_plain": "plain", "plain_echo": "plain",
}  # fmt: skip
KEY = ("contestant", "servers", "in_flight", "run")
SERVERS = (1, 2)
WHATS = {"pull": "pull", "push": "push", "pull_push": "pull and push in turn"}
N_ROWS, DIM = 1_000_000, 16


def add_parser(subparsers: Subparsers) -> None:
    parser = measure.add_benchmark(
        subparsers, "ps", "rows/s of the companion servers", __doc__, run, help="rows in it are kept"
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[8192, 2048, 32768], help="rows per request; the first makes the ratios"
    )
    parser.add_argument(
        "--in-flight", type=int, nargs="+", default=[1], metavar="N", help="pushes on the way at a time; 1: one after "
        "the other",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1.0, help="time of each measurement")
    parser.add_argument("--runs", type=int, default=3, help="launches of each contestant")
    measure.add_chosen(parser, "--contestants", CONTESTANTS, "NAME")
    measure.add_chosen(parser, "--wire", WIRES, "WIRE", help="contestants of other wires are left out")
    noise.add_option(parser)
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help="for one run")


@dataclass(frozen=True)
class Run:
    """One launch, which has a row for each request size and direction."""

    contestant: str
    servers: int
    in_flight: int
    run: int

    def __str__(self) -> str:
        return f"{self.contestant} {self.servers}, {self.in_flight} in flight, run {self.run + 1}"


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    measure.require_at_least(args, rows=1, in_flight=1, runs=1)
    chosen = [name for name in args.contestants if OF_WIRE.get(name, args.wire[0]) in args.wire]
    planned = [
        Run(name, servers, in_flight, number)
        for number in range(args.runs)
        for in_flight in args.in_flight
        for name in chosen
        for servers in SERVERS
    ]
    settings = {"table": [N_ROWS, DIM], "rows": args.rows, "seconds": args.seconds, **noise.setting(args.noise)}

    commands = {name: str(variant(Run(name, 1, 1, 0))) for name in chosen}

    def more(rows: list[Row]) -> dict[str, Any]:
        of_all = {**results.before.get("commands", {}), **commands}
        return {
            "contestants": CONTESTANTS,
            "commands": of_all,
            **ratios(rows, args.rows[0]),
            "rows_per_s": speeds(rows),
        }

    results = resumable.Results(args.out, KEY, settings, more, packages=("torch", "pyzmq", "numpy"))
    with noise.Noise(args.noise), tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
        results.run_each(results.waiting(planned), lambda one: results.rows.extend(launch(one, Path(scratch), args)))
    show(results.rows, more(results.rows), noise.beside(args.noise))
    return results.end()


def variant(one: Run) -> Variant:
    python = (sys.executable, "-W", "ignore", "-m", f"{__package__}.client")
    words = (one.contestant, "--servers", str(one.servers), "--in-flight", str(one.in_flight))
    return Variant(str(one), (*python, *words), {"OMP_NUM_THREADS": "1", "TP_SOCKET_IFNAME": "lo"})


def launch(one: Run, folder: Path, args: argparse.Namespace) -> list[Row]:
    """One run: a row for each request size and direction. Raises RunFailed."""
    arguments = ["--rows", *args.rows, "--seconds", args.seconds]
    measured = measure.result_of(variant(one), arguments, folder, args.timeout)
    found: list[Row] = [{"run": one.run, **row} for row in measured]
    speeds = ", ".join(
        f"{row['what']} {row['rows']}: {row['rows_per_s'] / 1e6:.2f} M/s" for row in found if "rows_per_s" in row
    )
    print(f"{one}: {speeds}", flush=True)
    return found


def speeds(rows: Sequence[Row]) -> dict[str, float]:
    """Rows/s, by contestant, servers, rows, direction, and pushes in flight where these are several."""
    of = ("contestant", "servers", "rows", "what", "in_flight")
    return {
        " ".join(map(str, key)) + _words(in_flight): value
        for (*key, in_flight), value in measure.medians(rows, of, "rows_per_s").items()
    }


def ratios(rows: Sequence[Row], n: int) -> dict[str, Any]:
    """As of `headline`, by pushes in flight where these are several."""
    found: dict[str, Any] = {}
    for in_flight in sorted({row["in_flight"] for row in rows}):
        of_these = headline([row for row in rows if row["in_flight"] == in_flight], n)
        found |= {name + _words(in_flight): value for name, value in of_these.items()}
    return found


def _words(in_flight: int) -> str:
    return f" {in_flight} in flight" if in_flight > 1 else ""


def headline(rows: Sequence[Row], n: int) -> dict[str, Any]:
    """Ours, with each wire, over each other contestant at n rows a request: by servers, and the worst of them."""
    result: dict[str, Any] = {}
    for what in ("pull", "push"):
        some = [row for row in rows if row["what"] == what and row["rows"] == n]
        speed = measure.medians(some, ("contestant", "servers"), "rows_per_s")
        of_wire = [("ours", "zmq_curve", what)]
        of_wire += [(f"ours_{wire}", f"{wire}_echo", f"{what}_{wire}") for wire in ("tls", "plain")]
        for ours, echo, name in of_wire:
            for other in ("rpc", echo):
                ratios = {
                    str(servers): speed[ours, servers] / against
                    for servers in SERVERS
                    if (ours, servers) in speed and (against := speed.get((other, servers))) is not None
                }
                if ratios:
                    result[f"{name}_vs_{other}"] = min(ratios.values())
                    result[f"{name}_vs_{other}_by_servers"] = ratios
    return result


def show(rows: Sequence[Row], result: Mapping[str, Any], beside: str = "") -> None:
    """Medians with the profile: who spends processor time on a request, and how long it takes."""
    columns = {
        "rows_per_s": "M rows/s", "ms": "ms", "cpu_ms_client": "CPU ms client", "kernel_ms_client": "in the kernel",
        "cpu_ms_servers": "CPU ms servers", "kernel_ms_servers": "in the kernel",
    }  # fmt: skip
    of = ("what", "contestant", "servers", "in_flight", "rows")
    values = {name: measure.medians(rows, of, name) for name in columns}
    for what, title in WHATS.items():
        table = [
            (*map(str, key[1:]), f"{speed / 1e6:.2f}", *(f"{values[name][key]:.2f}" for name in list(columns)[1:]))
            for key, speed in sorted(values["rows_per_s"].items(), key=lambda at: at[0][4])
            if key[0] == what
        ]
        titles = ("contestant", "servers", "in flight", "rows", *columns.values())
        measure.print_table(f"{title}, medians{beside}", titles, table)
    leases = {name: measure.medians(rows, of[1:4], name) for name in ("p50_ms", "p99_ms", "p99_over_p50")}
    table = [(*map(str, key), *(f"{by_key[key]:.2f}" for by_key in leases.values())) for key in leases["p50_ms"]]
    measure.print_table(f"a lease under load, medians{beside}", ("contestant", "servers", "in flight", *leases), table)
    for name, value in result.items():
        if "_vs_" in name:
            print(f"{name}: {json.dumps(value)}")
