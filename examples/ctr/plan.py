"""What a job will need and do, as text, before anything is started (`--dry-run`)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch import nn

from ctr.build import dense_optimizer, features, row_optimizer, table_shapes
from ctr.config import Checkpoint, Dense, JobConfig, Switching
from ctr.datasets import Splits
from ctr.measures import selects, title_of
from gba_hvd.batch import Bag
from gba_hvd.config import Config
from gba_hvd.epoch import EpochPlan, shares
from gba_hvd.faults import Fault
from gba_hvd.gradients.clipping import Clip
from gba_hvd.mode_names import BY_NAME
from gba_hvd.shm.layout import Layout
from gba_hvd.torch_optimizers import spec_of
from recovery.redaction import redacted


def plan(config: JobConfig, splits: Splits | None, faults: Sequence[Fault] = (), tried: str | None = None) -> str:
    """The plan of a job; without `splits` (not prepared yet) as far as it is known then.

    tried: what came of one batch, if one was tried
    """
    lines = [("job", f"{config.name}: {config.model.kind}, seed {config.seed}")]
    if splits is None:
        lines += [("data", f"{config.data.dir} is not prepared yet (the first run does it), so sizes are not known")]
        lines += [("batch", "not tried, for the same reason: `gba-hvd data prepare` first, then --data STORE")]
    else:
        lines += _data(config, splits)
        lines += _memory(config, splits.train.tables)
    if tried is not None:
        lines.append(("batch", tried))
    lines += _steps(config, None if splits is None else len(splits.train))
    lines += _modes(config.switching, config.dense)
    lines += _compression(config)
    if config.checkpoint is not None:
        lines += _checkpoints(config.checkpoint)
    for number, fault in enumerate(faults):
        details = [f"{name} {value}" for name, value in fault.entry().items() if name != "kind"]
        lines.append(("" if number else "faults", ", ".join([fault.kind, *details])))
    return "\n".join(f"{title:<10}{text}" for title, text in lines)


def most_steps(config: JobConfig, n_samples: int) -> int:
    """Steps when no early stop shortens the job."""
    return config.train.epochs * EpochPlan(n_samples, config.train.global_batch, config.train.micro_batch).n_steps


def _data(config: JobConfig, splits: Splits) -> Iterator[tuple[str, str]]:
    samples = ", ".join(f"{n:,} {split}" for split, n in splits.sizes.items())
    made_up = "synthetic behaviour log" if config.data.preset == "behaviour" else "synthetic log"
    yield "data", f"{config.data.dir or made_up}: {samples} samples"
    if splits.of_day is not None:
        yield "", "each epoch is a day with samples of its own; test samples are those of the day after"
    if config.reads_sequences:
        made = config.data.preset == "behaviour"
        longest = config.data.behaviour.max_length if made else config.data.max_history
        history = f"histories of up to {longest} clicks"
        yield "", f"{history}; features {', '.join(features(config))}"
        return
    multi = [name for name, ids in splits.train.take(np.arange(1)).ids.items() if isinstance(ids, Bag)]
    pooled = f"; multi-valued, pooled by {config.embedding.pooling}: {', '.join(multi)}" if multi else ""
    if config.model.kind == "youtube_dnn":
        yield "", "samples with label 1 only; the item is found by all other fields"
    n_fields = len(splits.train.take(np.arange(1)).ids)
    yield "", f"{n_fields} categorical and {splits.train.n_dense} numeric fields{pooled}"


def _memory(config: JobConfig, rows: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    settings, shapes = Config.from_env(), table_shapes(config, rows)
    optimizer = row_optimizer(config.embedding)
    layout = Layout.of(shapes, optimizer.slots, settings.n_shards, config.seed, config.embedding.init_std)
    yield "tables", f"{'name':<16}{'rows':>14}{'columns':>9}{'weights':>12}"
    for name, (n_rows, columns) in shapes.items():
        yield "", f"{name:<16}{n_rows:>14,}{columns:>9}{_size(4 * n_rows * columns):>12}"
    weights = sum(4 * n_rows * columns for n_rows, columns in shapes.values())
    yield "", f"{'all':<16}{sum(rows.values()):>14,}{'':>9}{_size(weights):>12}"
    slots = ", ".join(f"{s.name} per {'row' if s.per_row else 'weight'}" for s in optimizer.slots) or "no slots"
    yield "optimizer", f"rows: {config.embedding.optimizer} ({slots}); the rest: {config.dense.optimizer}"

    yield (
        "memory",
        f"{_size(layout.n_bytes)} in S = {layout.n_shards} shards: weights, optimizer slots, access counters",
    )
    per_host = [f"{hosts}: {_size(-(-layout.n_shards // hosts) * layout.region_bytes)}" for hosts in (1, 2, 4, 8)]
    yield "", f"per host, one copy for all its workers, by number of hosts  {'  '.join(per_host)}"
    free = shutil.disk_usage(settings.shard_dir).free
    fits = "enough" if free > layout.n_bytes else "NOT enough for one host: set GBA_HVD_SHARD_DIR to a larger folder"
    yield "", f"{settings.shard_dir} has {_size(free)} free: {fits}"


def _steps(config: JobConfig, n_samples: int | None) -> Iterator[tuple[str, str]]:
    train, m = config.train, config.train.micro_batches
    yield "step", f"G = {train.global_batch:,} samples = M {m} micro-batches x B {train.micro_batch:,}, always"
    if train.device != "cpu":
        yield "", f"dense part on {train.device}, which is not tried here: one batch is tried on the CPU"
    clip = Clip(train.max_norm, train.max_row_norm)
    if not clip.is_none:
        yield "", f"its gradient is clipped: {clip}"
    yield "workers", "micro-batches of a step for each worker"
    for n_workers in sorted({n for n in (1, 2, 3, 4, 8, m) if n <= m}):
        yield "", f"{n_workers:>4}  {_shares_text(m, n_workers)}"
    yield "", f"more than {m}: the extra workers idle"
    if n_samples is not None:
        most = most_steps(config, n_samples)
        yield "epoch", f"{most // train.epochs:,} steps; at most {train.epochs} epochs = {most:,} steps"
    patience = f"stop after {train.early_stop} epochs without gain" if train.early_stop else "no early stop"
    rates, by = "constant learning rates", title_of(selects(config))
    if train.plateau_factor:
        rates = f"learning rates x {train.plateau_factor:g} when validation {by} stops improving"
    yield "schedule", f"{rates}; {patience}"


def _modes(switching: Switching | None, dense: Dense) -> Iterator[tuple[str, str]]:
    if switching is None:
        yield "mode", "allreduce throughout"
        return
    s, visited = switching, {switching.mode, *switching.switch_at.values()}
    if s.mode == "auto":
        yield "mode", f"auto: gba when predicted {s.enter_gain:g}x as fast as allreduce, back below {s.leave_gain:g}x,"
        yield "", f"each for {s.patience} steps, after {s.min_stay} steps or more in a mode"
        if s.trial_budget:
            yield "", f"the other mode is tried where it may be faster, for {s.trial_budget:.1%} of the work at most"
        if s.warm_up_steps:
            yield "", f"allreduce in the first {s.warm_up_steps} steps of the job"
    else:
        yield "mode", s.mode
    for step, mode in sorted(s.switch_at.items()):
        yield "", f"{mode} from step {step:,}"
    if visited & {"auto", "gba"}:
        of = "" if s.staleness_of == "token" else ", by the age of dense values"
        yield "", f"gba: staleness weighting {s.staleness}, tolerance {s.tolerance} steps{of}"
    callback = s.callback()
    callback.check_fits(spec_of(dense_optimizer(dense, nn.Linear(1, 1))))
    if s.rule is None and visited & {"auto", "gba"}:
        yield "", f"gradients that come late in gba: {callback.rule_in('gba')}"
    elif callback.has_rule:
        yield "", f"gradients that come late: rule {callback.requested_rule}"
    options = {mode: BY_NAME[mode].options for mode in callback.modes_to_come}
    if s.lookahead is not None and any("lookahead" in used for used in options.values()):
        yield "", f"micro-batches are handed out {s.lookahead} steps ahead at most"
    if "hop_bs" in visited:
        yield "", f"hop_bs: at most {s.slack} micro-batches ahead of the slowest worker"
    if "hop_bw" in visited:
        yield "", f"hop_bw: a step does not wait for the last {s.backups} of the workers"
    if "shadow" in visited:
        share = callback.averaging("shadow").elasticity
        yield "", f"shadow: replicas synchronised by {s.sync} in the background, elasticity {share:g}"
    for mode in (mode for mode, used in options.items() if "every" in used):
        share = callback.averaging(mode).elasticity
        yield "", f"{mode}: replicas synchronised every {s.every} local steps, elasticity {share:g}"


def _compression(config: JobConfig) -> Iterator[tuple[str, str]]:
    travels = {"dense gradients": config.compression.spec(), "rows between hosts": config.row_compression.spec()}
    for number, (what, spec) in enumerate((what, spec) for what, spec in travels.items() if not spec.is_none):
        yield "" if number else "compress", f"{what}: {spec}"


def _checkpoints(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    often = [f"{checkpoint.every_steps:,} steps"] if checkpoint.every_steps else []
    often += [f"{checkpoint.every_s:g} s"] if checkpoint.every_s else []
    pace = f"every {' or '.join(often)}" if often else "as often as planned from what is measured"
    yield "save", f"to {redacted(checkpoint.url)} {pace}"
    policy = checkpoint.policy or ("delta" if often else "mfu (on one host: delta)")
    partial = "all rows" if policy == "full" else f"rows chosen by {policy} on top of a full save"
    start = "resumes from the newest one there" if checkpoint.resume else "starts over beside those there"
    epochs = f" and the last of each of {checkpoint.keep_epochs} epochs" if checkpoint.keep_epochs else ""
    yield "", f"{partial}; keeps {checkpoint.keep_last}{epochs}; {start}"


def _shares_text(n_micro: int, n_workers: int) -> str:
    counts = shares(n_micro, n_workers)
    groups = [f"{counts.count(n)} x {n}" for n in sorted(set(counts), reverse=True)]
    return f"{counts[0]} each" if len(groups) == 1 else " + ".join(groups)


def _size(n_bytes: int) -> str:
    amount, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":
            break
        amount /= 1024
    return f"{amount:,.0f} {unit}" if unit == "B" else f"{amount:,.1f} {unit}"
