"""What hashed tables do in another way than the job that saved the checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gba_hvd.callbacks import Event
from gba_hvd.training.engine import Engine
from recovery.restore import Report


def changed_vocabularies(engine: Engine, report: Report) -> Iterator[Event]:
    saved, now = report.manifest.about.get("hashed", {}), engine.model.tables.layout.hashed_settings()
    for table, settings in now.items():
        before, sizes = saved.get(table, {}), ("capacity", "fallback_rows", "fallback_hashes")
        compared = {name: (before.get(name, value), value) for name, value in settings.items() if name not in sizes}
        changed = {name: list(values) for name, values in compared.items() if values[0] != values[1]}
        texts = [
            f"{name} was {_said(was)} when the checkpoint was saved and is {_said(value)}"
            for name, (was, value) in changed.items()
        ]
        if changed:
            texts[-1] += ": that holds for ids that come from now on, rows that are there stay as they are"
        if text := _changed_sums(table, settings["fallback_hashes"], engine, report):
            changed["fallback_hashes"] = [before.get("fallback_hashes", 1), settings["fallback_hashes"]]
            texts.append(text)
        if moved := _moved_shared_rows(table, settings, engine, report):
            changed["fallback_rows"] = [moved[0], settings["fallback_rows"]]
            texts.append(moved[1])
        is_empty = table in report.without_filter
        if is_empty:
            texts.append(
                "the checkpoint has no counts of lookups of ids without a row that fit (they are kept where the number "
                f"of shards stays): such an id needs admit_after={settings['admit_after']} lookups from here on"
            )
        if texts:
            data = {"table": table, "changed": changed, "counts_kept": not is_empty}
            text = f"table {table!r}: {'; '.join(texts)}"
            yield Event("vocabulary_changed", engine.progress.step, text, data, level="warning")


def _changed_sums(table: str, hashes: int, engine: Engine, report: Report) -> str:
    """What becomes of ids without a row whose shared rows are not those that they had; empty: they are the same."""
    schema, n_shards = report.manifest.schema, engine.model.tables.layout.n_shards
    was = next((one.shared_hashes for one in schema.tables if one.name == table), hashes)
    if was == hashes and (hashes == 1 or schema.n_shards == n_shards):
        return ""
    if was == hashes:
        return (
            f"the second shared row of an id without a row is another one in {n_shards} shards than in "
            f"{schema.n_shards}, and starts as zeros"
        )
    said = f"ids without a row had {was} shared row{'s' * (was > 1)} each when the checkpoint was saved, "
    if hashes == 1:
        return said + "and have the first of them: fallback_hashes=2 keeps both"
    return said + "and are sums of 2, of which the second starts as zeros: fallback_hashes=1 keeps what was there"


def _moved_shared_rows(table: str, settings: dict[str, Any], engine: Engine, report: Report) -> tuple[int, str] | None:
    """(shared rows in the checkpoint, what becomes of them), where their number here is no multiple; else None.

    With two hashes each has half of the rows, in equal parts in all shards.
    """
    schema, n_shards = report.manifest.schema, engine.model.tables.layout.n_shards
    saved = next((one for one in schema.tables if one.name == table), None)
    if saved is None:
        return None
    rows, hashes, was_rows = settings["fallback_rows"], settings["fallback_hashes"], saved.shared_rows * schema.n_shards
    was = was_rows // saved.shared_hashes
    if rows // hashes % was == 0:
        return None
    has_both = hashes == 1 or (saved.shared_hashes, schema.n_shards) == (hashes, n_shards)
    return was_rows, (
        f"{rows:,} shared rows are here, {was_rows:,} are in the checkpoint: many ids without a row find other shared "
        f"rows than those that they trained. fallback_rows={hashes * math.lcm(was, n_shards)}, or a multiple of it, "
        f"keeps {'them' if has_both else 'the first of each id'}"
    )


def _said(setting: Any) -> str:
    return f"{setting:g}" if isinstance(setting, float) else str(setting) or "none"
