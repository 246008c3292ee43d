"""Whether the checkpoint that a launch resumed from is exactly what it would save now: then it need not save again.

Decided for a launch that trained no step, in allreduce mode, on one host. Rows: all of them were read from the
checkpoint, checked, and none was written since, which the counters of changes beside the rows show; nothing of it was
left out or moved (another number of shards, another size of a hashed table). All else is
compared by its bytes: dense part, optimizers, position, account, the script's values, the callbacks' state, residuals,
random number streams.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from gba_hvd.ps.messages import SaveAbout
from recovery.format.manifest import Manifest
from recovery.restore import Report
from recovery.rows import Schema

_COMPARED = ("job", "mode", "global_batch", "micro_batch", "n_servers", "given", "compression", "hashed")


@dataclass(frozen=True)
class ResumedCheckpoint:
    """What a launch keeps of the checkpoint that it resumed from.

    digest: of the training state. why_not: memory is not what the checkpoint has; empty: it is
    """

    name: str
    step: int
    schema: Schema
    about: Mapping[str, Any]
    digest: bytes
    why_not: str

    @classmethod
    def of(cls, report: Report) -> ResumedCheckpoint:
        newest = report.manifest
        return cls(
            newest.name, newest.step, newest.schema, newest.about, digest_of(report.state or b""), _left_out(report)
        )

    def why_save(self, *, step: int, newest: str, schema: Schema, about: SaveAbout) -> str:
        """Why a save at this step is not spared, as far as is known without the rows and the state; empty: it may be.

        newest: the name of the newest checkpoint that is whole, empty where a newer one is damaged
        """
        if self.why_not:
            return self.why_not
        if step != self.step:
            return f"step {step} was reached, the checkpoint is of step {self.step}"
        if newest != self.name:
            return f"the newest checkpoint is {newest or 'damaged'}"
        if schema != self.schema:
            return "tables or shards have another size"
        now = json.loads(json.dumps(msgspec.to_builtins(about)))
        changed = [name for name in _COMPARED if now.get(name) != self.about.get(name)]
        return f"settings that a checkpoint has are others: {', '.join(changed)}" if changed else ""


def digest_of(state: bytes) -> bytes:
    return xxhash.xxh3_128_digest(state)


def _left_out(report: Report) -> str:
    if report.state is None or not report.chain.is_complete:
        return "its chain leaves out changes"
    if report.skipped or report.n_lost or report.without_room or report.without_filter:
        return "it was not restored completely"
    if report.manifest.about.get("last_gasp") or any(_is_ahead(one) for one in report.chain.manifests):
        return "some of its rows are ahead of its step"
    return ""


def _is_ahead(manifest: Manifest) -> bool:
    return any(section.step > manifest.step for blob in manifest.blobs for section in blob.sections)
