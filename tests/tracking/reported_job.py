"""A job that saw everything, reported to callbacks: both modes, switches with reasons, a worker that left, drops."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

from gba_hvd.callbacks import Callback, Event, Job, StepRecord

SWITCHES = {
    120: ("allreduce", "gba", "worker 2 takes 6.1x the median, predicted 2.4x faster for 5 steps"),
    300: ("gba", "allreduce", "gba is predicted 1.02x as fast, the limit is 1.05x"),
}
DECISIONS = {
    5: ("allreduce", 1.02, "gain", "stay in allreduce: gba predicted 1.02x as fast, enter at 1.05x"),
    120: ("gba", 2.4, "switch", f"to gba: {SWITCHES[120][2]}"),
    130: ("gba", 2.4, "gain", "stay in gba: gba predicted 2.40x as fast, leave below 1.00x"),
    299: ("allreduce", 0.98, "switch", f"to allreduce: {SWITCHES[300][2]}"),
}


def report_job(callbacks: Iterable[Callback], n_steps: int = 400, job_id: str = "ctr-42") -> None:
    """Allreduce; from step 100 worker 2 is slow; gba from 120 to 300; worker 1 dies at 330, and its host's rows come
    back from a checkpoint; there is one every 100 steps."""
    draw = random.Random(1)
    listeners = list(callbacks)
    job = Job(job_id, 0, 3, 0, "h1", True, {"lr": 0.05, "global_batch": 3072, "note": "<b>not bold</b>"})
    for callback in listeners:
        callback.on_job(job)
    counted: dict[int, int] = {}
    data: dict[str, Any]
    dropped = 0
    for k in range(1, n_steps + 1):
        slow, mode = 100 < k <= 290, "gba" if 120 < k <= 300 else "allreduce"
        workers = 2 if k > 330 else 3
        rate = 40_000 if not slow else 8_000 if mode == "allreduce" else 31_000
        seconds = [(rank, (0.06 if rank == 2 and slow else 0.01) * draw.uniform(0.9, 1.1)) for rank in range(workers)]
        if mode == "gba":
            for _ in range(6):
                late = min(int(draw.expovariate(1.2)), 6)
                counted[late] = counted.get(late, 0) + 1
                dropped += 512 * (late > 4)
            data = {
                "seconds": {str(rank): s for rank, s in seconds},
                "staleness": {str(s): n for s, n in counted.items()},
            }
            data |= {"lags": {str(s): n for s, n in counted.items()}, "gaps": {"0": [k, 0.5 * k, 1.5 * k, 7]}}
            data |= {"dropped": dropped, "lost": 0, "refused": 0, "reissued": int(k > 200)}
        else:
            data = {"seconds": {str(rank): s for rank, s in seconds}}
        data |= {"elp": 512 * workers, "gain": 2.4 if slow else 1.02}
        data |= {"allreduce_samples_per_s": 10_000, "gba_samples_per_s": 24_000 if slow else 10_200}
        data |= {"bytes_sent": 1000 * k, "bytes_received": 900 * k}
        for callback in listeners:
            callback.on_event(Event("rates", k, "how long the workers take", data))
        loss = 0.4 + 0.3 * math.exp(-k / 80) + draw.gauss(0, 0.01)
        record = StepRecord(
            k, k // 200, 3072, 3072 * k - dropped, 3072 / rate * draw.uniform(0.9, 1.1), workers, mode, loss
        )
        for callback in listeners:
            callback.on_step(record)
        if k % 100 == 0:
            for callback in listeners:
                callback.on_metrics(k, {"valid_auc": 0.8 - 0.1 * math.exp(-k / 120)})
        events = []
        if k in DECISIONS:
            mode, gain, kind, reason = DECISIONS[k]
            events.append(Event("decision", k, reason, {
                "mode": mode, "gain": gain, "kind": kind, "allreduce_samples_per_s": 10_000.0,
                "gba_samples_per_s": 10_000 * gain,
            }))  # fmt: skip
        if k in SWITCHES:
            was, to, reason = SWITCHES[k]
            data = {"from": was, "to": to, "seconds": 0.0123, "reason": reason}
            events.append(Event("switch", k, f"{was} -> {to}: {reason}", data))
        if k % 100 == 0:
            data = {"url": "file:///jobs/ctr", "manifest": f"manifests/000001-{k:08d}.json", "kind": "full"}
            data |= {"saved_step": k, "n_bytes": 2_500_000, "rows": 9000, "seconds": 0.4}
            events.append(Event("checkpoint", k, f"step {k} saved", data))
        if k == 330:
            events.append(Event("worker_lost", k, "a worker is gone, or cannot be reached"))
            events.append(Event("membership", k, "2 workers on 1 host, before 3; resuming at step 330"))
            data = {"rows_restored": 3000, "rows_lost": 0, "age": 30.0, "pls": 0.0025, "pls_total": 0.0025}
            events.append(Event("rows_restored", k, "3,000 rows came back from the checkpoint, 30 steps old", data))
        if k == n_steps:
            total = 3072 * n_steps
            data = {"samples_total": total, "samples_applied": total - dropped, "samples_dropped": dropped}
            ages = {str(s): n for s, n in counted.items()}
            data |= {
                "samples_lost": 0,
                "restarts": 1,
                "staleness": ages,
                "lags": ages,
                "gaps": {"0": [9, 4.5, 13.5, 7]},
            }
            events.append(Event("finished", k, "finished", data))
        for event in events:
            for callback in listeners:
                callback.on_event(event)
