"""How a person trains an epoch again from its first batch: in words, for errors that refuse to continue it."""

from __future__ import annotations

import shlex

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.errors import BadInput
from gba_hvd.training.engine import Engine
from recovery.catalog.chains import chains
from recovery.catalog.epoch_position import newest_before
from recovery.errors import RecoveryError
from recovery.redaction import redacted


def way_back(engine: Engine, epoch: int) -> str:
    """Go back to the newest checkpoint from before the epoch, by name on the chief, which alone looks for it."""
    checkpoints = checkpoints_of(engine)
    cost = f"discards all that was trained ({engine.progress.step:,} steps)"
    if checkpoints is None or not checkpoints.callback.resume:
        return f"start over, which {cost}"
    url = shlex.quote(redacted(checkpoints.callback.url))
    options = " --option KEY=VALUE, as in storage_options" if checkpoints.callback.storage_options else ""
    name, which = "NAME", f"`gba-hvd checkpoint ls {url}` names it"
    if engine.world.rank == 0:
        try:
            found = newest_before(chains(checkpoints.store), epoch)
        except (BadInput, RecoveryError, OSError):
            pass
        else:
            if found is None:
                return (
                    f"start over (resume=False, or another url for checkpoints), which {cost}: {url} has no checkpoint "
                    f"from before epoch {epoch}"
                )
            name, which = found[0].name.removeprefix("manifests/").removesuffix(".json"), found[1].words
    return (
        f"go back to the newest checkpoint from before it ({which}): `gba-hvd checkpoint rollback {url} {name}`"
        f"{options}. Then give the same command again. (resume=False would start over, which {cost})"
    )
