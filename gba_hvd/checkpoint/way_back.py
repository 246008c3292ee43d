"""How a person trains an epoch again from its first batch: in words, for errors that refuse to continue it."""

from __future__ import annotations

import shlex

from gba_hvd.checkpoint.job_checkpoints import checkpoints_of
from gba_hvd.errors import BadInput
from gba_hvd.training.engine import Engine
from recovery.catalog.chains import Chain, chains
from recovery.catalog.epoch_position import newest_before, position_of
from recovery.errors import RecoveryError
from recovery.format.manifest import Manifest
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
            own = [
                one.newest for one in chains(checkpoints.store) if isinstance(one, Chain) and _is_of(engine, one.newest)
            ]
            found = newest_before(own, epoch)
        except (BadInput, RecoveryError, OSError):
            pass
        else:
            if found is None and all(map(position_of, own)):
                return (
                    f"start over (resume=False, or another url for checkpoints), which {cost}: {url} has no checkpoint "
                    f"from before epoch {epoch}"
                )
            if found is not None:
                name, which = found[0].name.removeprefix("manifests/").removesuffix(".json"), found[1].words
    return (
        f"go back to the newest checkpoint from before it ({which}): `gba-hvd checkpoint rollback {url} {name} "
        f"--yes`{options}. Then give the same command again. (resume=False would start over, which {cost})"
    )


def _is_of(engine: Engine, saved: Manifest) -> bool:
    """Whether this job saved it, since it began or started over: the folder may have those of others."""
    checkpoints = checkpoints_of(engine)
    return (
        checkpoints is not None and saved.epoch >= checkpoints.first_epoch and saved.about.get("job") == engine.job.id
    )
