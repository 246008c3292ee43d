"""Brings rows back from a store: the newest good checkpoint wins, and only verified bytes reach a table.

A checkpoint that turns out to be damaged is named, and all that was asked for comes from the one before. How sections
are read and where their rows go is in `row_loader`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from recovery.catalog.chains import Chain, Skipped, chains, open_chain
from recovery.config import Config
from recovery.errors import BadInput, Damaged, NotFound
from recovery.format.manifest import Manifest, difference
from recovery.restore.inspect import read_state
from recovery.restore.row_loader import Age, Filling
from recovery.rows import RowSource
from recovery.storage.store import Store

__all__ = ["Age", "Report", "TrainingPoint", "restore"]


@dataclass(frozen=True)
class TrainingPoint:
    """How far training was when the rows were lost. total_samples: of the whole run. None: not known to who asks."""

    step: int
    samples: int | None = None
    total_samples: int | None = None


@dataclass(frozen=True)
class Report:
    """What a restore brought back.

    n_rows: restored. n_lost: asked for, but never saved; they are as the row source had them.
    age: against the step that the job was at, or that the checkpoint's state has.
    samples_since: applied since the checkpoint was made. saved_samples: applied when each row was itself saved last,
        mean over the rows; see `Filling.saved_samples`.
    pls: the portion of lost samples (CPR: (S_i - S_last_save) / (S_total * N_emb)), each row from its own last save,
        and rows restored over all rows in place of 1 / N_emb. None: not known.
    state: the bytes saved beside the rows; None: not asked for, or there were none.
    skipped: newer checkpoints that could not be used, and why.
    without_room: by keyed table, keys that found no room among the rows for keys in these shards, and those rows.
    without_filter: keyed tables that count lookups of keys without a row, and start over with that.
    of_other_steps: rows by their step, where it is not that of the state; see `Filling.of_other_steps`.
    """

    chain: Chain
    n_rows: int
    n_lost: int
    age: Age
    samples_since: int | None
    saved_samples: float
    pls: float | None
    n_bytes: int
    seconds: float
    state: bytes | None
    skipped: tuple[Skipped, ...]
    without_room: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    without_filter: tuple[str, ...] = ()
    of_other_steps: Mapping[int, int] = field(default_factory=dict)

    @property
    def manifest(self) -> Manifest:
        """The restored checkpoint's manifest."""
        return self.chain.newest

    @property
    def step(self) -> int:
        """The step of the restored checkpoint's state."""
        return self.manifest.step

    @property
    def samples(self) -> int:
        """Samples that were applied when the restored checkpoint was made."""
        return self.manifest.samples


def restore(
    store: Store,
    source: RowSource,
    shards: Sequence[int] | None = None,
    *,
    config: Config | None = None,
    now: TrainingPoint | None = None,
    with_state: bool = True,
    check_state: Callable[[str, bytes], object] = lambda name, state: None,
    is_wanted: Callable[[int, int], bool] = lambda epoch, number: True,
    only: str | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Report | None:
    """Fill shards of the row source (None: all that are here) from the newest good checkpoint; None: there is none.

    No other thread may use these shards meanwhile. Other shards are not touched. Beside the budget, a chain with
    partial saves takes one byte a row.

    check_state: called with the manifest's name and the state, before rows are read; a checkpoint for which it raises
        Damaged counts as damaged.
    is_wanted: by the epoch it was written under and its number; the others are as if they were not there.
    only: this checkpoint and no other, by the name of its manifest.

    Raises BadInput when the checkpoint is of another model or of a newer version of this program, Damaged when there
    are checkpoints but no good one (the shards are then worth nothing), StoreError when the store fails.
    """
    started, schema = clock(), source.schema
    asked = tuple(source.shards() if shards is None else shards)
    if absent := sorted(set(asked) - set(source.shards())):
        raise BadInput(f"shards {absent} are not here; this row source has {list(source.shards())}")
    skipped: list[Skipped] = []
    for chain in chains(store, is_wanted) if only is None else [open_chain(store, only)]:
        if isinstance(chain, Skipped):
            skipped.append(chain)
            continue
        newest = chain.newest
        for manifest in chain.manifests:
            if differences := difference(manifest.schema, schema):
                raise BadInput(
                    f"{manifest.name} is a checkpoint of another model: {'; '.join(differences)}. Continue with what "
                    "it has, or start over: at another url, or with resume=False"
                )
        try:
            state = read_state(store, newest) if with_state else None
            if state is not None:
                check_state(newest.name, state)
            filling = Filling(store, source, asked, chain, config or Config())
            filling.run()
        except (Damaged, NotFound) as error:
            skipped.append(Skipped(newest.name, str(error), newest.step))
            continue
        since = now.samples - newest.samples if now and now.samples is not None else None
        pls = None
        if now and now.total_samples and since is not None:
            lost = max(0.0, now.samples - filling.saved_samples) if now.samples is not None else 0.0
            pls = lost / now.total_samples * filling.n_rows / schema.n_rows
        n_rows, age = filling.n_rows, filling.age(now.step if now else newest.step)
        n_bytes = filling.n_bytes + (newest.state.n_bytes if newest.state and with_state else 0)
        seconds, saved = clock() - started, filling.saved_samples
        return Report(
            chain, n_rows, filling.n_asked - n_rows, age, since, saved, pls, n_bytes, seconds, state, tuple(skipped),
            filling.without_room, filling.without_filter, filling.of_other_steps,
        )  # fmt: skip
    if skipped:
        flaws = "; ".join(one.words for one in skipped)
        raise Damaged(flaws if only else f"{store.url} has no checkpoint that is whole: {flaws}")
    return None
