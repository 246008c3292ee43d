"""One run of `bench gpu`: a fresh process trains one contestant, and times a block of steps."""

from __future__ import annotations

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .clicks import Clicks
from .summary import MEASURED, NOT_RUN
from .training import NotRun, Setting, Training

OUT_OF_MEMORY = "out of GPU memory"
PROFILED_STEPS, _DEAREST = 10, 25
_LOSSES = 10  # whose mean is the final loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=CONTESTANTS)
    parser.add_argument("--clicks", type=Path, required=True, help="folder of batches")
    parser.add_argument("--rows", type=int, required=True, help="of each table")
    for name in ("--dim", "--hot-rows", "--warm-up", "--steps", "--seed"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--threads", type=int, default=0, help="of torch on the CPU; 0: as torch has it")
    parser.add_argument("--optimizer", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="gets the dearest operators of more steps")
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    setting = Setting(args.rows, args.dim, args.optimizer, args.hot_rows, args.device, args.seed)
    clicks = Clicks.load(args.clicks)
    try:
        found = measured(setting, clicks, args)
    except NotRun as why:
        found = {"state": NOT_RUN, "why": str(why)}
    except Exception as error:
        if not is_out_of_gpu_memory(error):
            raise
        found = {"state": OUT_OF_MEMORY, "why": str(error)}
    args.result.write_text(json.dumps(found | {"gpu": name_of(setting.device)}))


def measured(setting: Setting, clicks: Clicks, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of a run."""
    on_gpu = torch.device(setting.device).type == "cuda"
    clicks = clicks.pinned() if on_gpu else clicks
    synchronize: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
    began = time.perf_counter()
    training = training_of(args.peer, setting, clicks)
    losses = [training.step()]
    synchronize()
    first_step_s = time.perf_counter() - began
    losses += [training.step() for _ in range(args.warm_up - 1)]
    synchronize()
    start, cpu = time.perf_counter(), time.process_time()
    losses += [training.step() for _ in range(args.steps)]
    synchronize()
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    found = {
        "state": MEASURED,
        "samples_per_s": args.steps * clicks.batch / seconds,
        "ms_per_step": 1000 * seconds / args.steps,
        "cpu_ms_per_step": 1000 * cpu_s / args.steps,
        "first_step_s": first_step_s,
        "loss": float(torch.stack(losses[-_LOSSES:]).mean()),
        "gpu_peak_bytes": 0,
        "gpu_in_use_bytes": 0,
    }
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        # Of torch's allocator, and what the card has in use in all: memory that was not allocated through torch, too.
        found |= {"gpu_peak_bytes": torch.cuda.max_memory_allocated(), "gpu_in_use_bytes": total - free}
    if args.profile is not None:
        args.profile.write_text(profile(training, synchronize, on_gpu))
    return found | training.finish()


def profile(training: Training, synchronize: Callable[[], None], on_gpu: bool) -> str:
    """Operators of some more steps that take most of the CPU's time, and of the GPU's."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    orders = ["self_cpu_time_total"]
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        orders.append("self_device_time_total")
    with torch.profiler.profile(activities=kinds) as profiler:
        for _ in range(PROFILED_STEPS):
            training.step()
        synchronize()
    averages = profiler.key_averages()
    return "\n".join(f"by {order}, {PROFILED_STEPS} steps\n" + averages.table(order, _DEAREST) for order in orders)


def is_out_of_gpu_memory(error: BaseException) -> bool:
    """Whether it says so, or what it was raised from does."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    if isinstance(error, RuntimeError) and "cuda" in text and "out of memory" in text:
        return True
    return error.__cause__ is not None and is_out_of_gpu_memory(error.__cause__)


def name_of(device: str) -> str:
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    return "no GPU"


def training_of(peer: str, setting: Setting, clicks: Clicks) -> Training:
    """A contestant; its module is imported here, since each needs other packages."""
    of_ours: dict[str, Any] = {"ours_hot": setting.hot_rows, "ours_all": "all"}
    more = {"hot_rows": of_ours[peer]} if peer in of_ours else {"merged": True} if peer == "hbm_merged" else {}
    module = importlib.import_module(f".{CONTESTANTS[peer]}", __package__)
    found: Training = module.training(setting, clicks, **more)
    return found


CONTESTANTS = {  # and their modules
    "hbm": "plain_torch", "hbm_merged": "plain_torch", "ours_host": "ours", "ours": "ours", "ours_hot": "ours",
    "ours_all": "ours", "torchrec_uvm": "torchrec",
}  # fmt: skip

if __name__ == "__main__":
    main()
