"""Take a share of one core, in bursts, until the parent is gone. Run by `noise.py`.

A burst is half a second of CPU time on average, then the process sleeps for as long as its share says. Where others
want the core too, a burst takes longer, and the pause is shorter.
"""

from __future__ import annotations

import argparse
import os
import random
import time

_BURST_S = 0.5  # of CPU time, on average: several micro-batches long, so that workers are slow in turn
_SLICE_S = 0.02  # between looks whether the parent lives


def pause_s(cpu_s: float, wall_s: float, share: float) -> float:
    """How long to sleep after a burst that took so much CPU time, in so much time, for the share to hold."""
    return max(0.0, cpu_s / share - wall_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--core", type=int, required=True)
    parser.add_argument("--share", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    os.sched_setaffinity(0, {args.core})
    draws = random.Random(args.core)
    while os.getppid() == args.parent:
        began_s, used_s, burst_s = time.monotonic(), time.process_time(), draws.expovariate(1 / _BURST_S)
        while time.process_time() - used_s < burst_s and os.getppid() == args.parent:
            sliced_s = time.process_time()
            while time.process_time() - sliced_s < _SLICE_S:
                pass
        until_s = time.monotonic() + pause_s(time.process_time() - used_s, time.monotonic() - began_s, args.share)
        while os.getppid() == args.parent and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _SLICE_S))


if __name__ == "__main__":
    main()
