"""Which systems `bench allreduce` compares, with which settings, and how each is launched.

Every peer gets the best of the settings tried. The others stay here under names of their own, to be tried again.
"""

from __future__ import annotations

from ..harness import measure
from ..harness.measure import Variant

SETTINGS = {
    "ours": "HOROVOD_CYCLE_TIME=3: a step has one Horovod operation, so idle cycles cost more than latency",
    "ours_micro": "ours with micro-batches of an eighth of the batch, as a job that switches to gba has them",
    "ours_sync": "the same with sync_micro_batch: the whole batch at once in allreduce mode",
    "horovod": "26 sparse tables, HOROVOD_CYCLE_TIME=3: the 52 allgathers of a step go in fewer, fuller responses",
    "horovod_default_cycle": "HOROVOD_CYCLE_TIME=1, Horovod's default",
    "horovod_short_cycle": "HOROVOD_CYCLE_TIME=0.3",
    "horovod_merged": "one sparse table of 5.2 M rows instead of 26: two allgathers a step",
    "horovod_dense": "sparse_as_dense=True: allreduce of whole tables",
    "torchrec": "table_wise, fused Adagrad, DDP for the dense part",
    "torchrec_pipeline": "the same in TrainPipelineSparseDist: the next batch's ids are exchanged meanwhile",
}


def variant(name: str, workers: int) -> Variant:
    """The launch of one of SETTINGS, short of the arguments that all workers take."""
    if name.startswith("torchrec"):
        return _torchrec(name, workers)
    if name == "ours":
        return measure.horovodrun(name, workers, "bench.allreduce.ours")
    if name in ("ours_micro", "ours_sync"):
        flags = ("--parts", "8", *(("--together",) if name == "ours_sync" else ()))
        return measure.horovodrun(name, workers, "bench.allreduce.ours", *flags)
    cycle_ms = {"horovod_default_cycle": "1", "horovod_short_cycle": "0.3"}.get(name, "3")
    flags = {"horovod_merged": ("--merged",), "horovod_dense": ("--sparse-as-dense",)}.get(name, ())
    return measure.horovodrun(name, workers, "bench.allreduce.plain_horovod", *flags, HOROVOD_CYCLE_TIME=cycle_ms)


def _torchrec(name: str, workers: int) -> Variant:
    from ..harness import peer_environments

    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}")
    flags = ("--pipeline",) if name == "torchrec_pipeline" else ()
    command = (str(peer_environments.torchrec_python()), *launcher, "-m", f"{__package__}.torchrec", *flags)
    return Variant(name, command, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"})
