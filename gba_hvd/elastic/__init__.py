"""Training that survives changes of membership without rolling back: `TorchState`, and `run` around the user's loop.

Horovod's elastic loop calls `sync` at the start and after every change, `restore` after a failure, `on_reset` after the
world was formed again. Horovod's own state copies the model at every commit and rolls everyone back to it. This one
does neither: the step's commit (`modes.allreduce_exchange`) already decides what happened, so `sync` compares steps and
training resumes.

`sync`, in the order in which things become visible; every rank runs every line, so no rank can wait for one that skips:

    1. gather  who has state, of which step, which step's row gradients it holds, which memory it maps
    2. agree   the newest step wins; a rank that missed its result applies the row gradients it holds
    3. open    the memory of each host, gather what it holds, place the shards (`shm.placement`)
    4. fill    shards that no host holds get initial rows, shards that change host are copied, then old copies are
    dropped 5. send    dense state, position, account, callbacks' state from one rank that has the newest step

A crash anywhere in it ends the others' collectives with an error and Horovod starts it again; 2 and 4 are safe to
repeat, since the step marks in shard memory record what was done.

`membership` does 1 to 4, `training_state` 5. `late_joiners` admits workers beside the training in an asynchronous
mode, `worker_saves` decides when a checkpoint is made and who leaves after it, `job_events` reports all this to the
callbacks.
"""

from __future__ import annotations

from gba_hvd.elastic.run import run
from gba_hvd.elastic.torch_state import TorchState

__all__ = ["TorchState", "run"]
