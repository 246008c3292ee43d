"""`gba-hvd bench row-dtypes`: what rows of one or two bytes a value cost a saved model in AUC.

One worker trains the example DeepFM on Frappe for some epochs. Its last checkpoint becomes a saved model, with which
`gba-hvd model predict --row-dtype` scores the test samples: rows in float32, int8 (one scale a row) and bfloat16. With
float32 its AUC must be the job's own after the last epoch.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness import measure
from ..harness.measure import EXAMPLES, Row, Subparsers, Variant

DTYPES = ("float32", "int8", "bfloat16")
CONFIG = EXAMPLES / "configs" / "frappe_deepfm.yaml"
GOAL = 0.0002  # AUC that int8 may lose


def add_parser(subparsers: Subparsers) -> None:
    does = "AUC of a saved model with rows in int8 and bfloat16"
    parser = measure.add_benchmark(subparsers, "row-dtypes", does, __doc__, run)
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR",
        help="the folder of train.csv.gz, valid.csv.gz and test.csv.gz (BARS frappe_x1)",
    )  # fmt: skip
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, nargs="+", default=[2021], metavar="N")
    parser.add_argument("--timeout", type=float, default=1200.0, metavar="SECONDS", help="for one process")


@measure.benchmark
def run(args: argparse.Namespace) -> int:
    if not CONFIG.is_file():
        raise measure.RunFailed(f"{CONFIG} is missing: run this from a clone of the repository")
    if not args.data.is_dir():
        raise measure.RunFailed(f"--data {args.data} is no folder")
    measure.require_at_least(args, epochs=1)
    about = measure.machine()
    settings = {"config": CONFIG.read_text(), "epochs": args.epochs, "seeds": args.seeds}
    rows: list[Row] = []
    try:
        for seed in args.seeds:
            with tempfile.TemporaryDirectory(prefix="gba-hvd-bench-") as scratch:
                rows += measured(Path(scratch), args, seed)
    finally:  # what was measured before a failure is kept
        if rows:
            found = headline(rows)
            measure.write_json(args.out, {"machine": about, "settings": settings, **found, "rows": rows})
            show(found)
    return 0


def measured(folder: Path, args: argparse.Namespace, seed: int) -> list[Row]:
    """A row of each dtype, of one trained model. Raises RunFailed."""
    launch = measure.launch
    common: dict[str, Any] = {"log": folder / "log", "timeout_s": args.timeout}
    path = os.pathsep.join(filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    checkpoints, model, samples = folder / "checkpoints", folder / "model", folder / "samples.parquet"
    words = ["--data", str(args.data), "--seed", str(seed), f"train.epochs={args.epochs}"]
    words += [f"checkpoint.url={checkpoints}", "checkpoint.every_steps=1000000000"]  # only the one at the end
    summary = measure.summary_of(measure.train_ctr(CONFIG, 1), words, folder, args.timeout)
    export = (sys.executable, "-m", f"{__package__}.export", "--config", str(CONFIG), "--data", str(args.data))
    words = ["--checkpoints", str(checkpoints), "--model", str(model), "--samples", str(samples)]
    launch(Variant("export", export, env), words, **common)
    predict = (measure.console_script("gba-hvd"), "model", "predict", str(model), str(samples), "--keep", "label")
    rows = []
    for dtype in DTYPES:
        out = folder / f"{dtype}.parquet"
        launch(Variant(dtype, predict, env), ["--out", str(out), "--row-dtype", dtype], **common)
        rows.append({"seed": seed, "dtype": dtype, **scored(out)})
        if dtype == "float32":
            check_same(rows[-1]["auc"], summary["auc_last"])
        print(f"seed {seed}  {dtype:8s} AUC {rows[-1]['auc']:.6f}", flush=True)
    return rows


def check_same(auc: float, of_job: float) -> None:
    """Raises RunFailed. Scores of a batch of another size may differ in the last bit."""
    if not abs(auc - of_job) < 1e-5:
        raise measure.RunFailed(f"the saved model has AUC {auc}, the job that trained it had {of_job}")


def scored(file: Path) -> Row:
    """auc, and how many samples it is of."""
    import pyarrow.parquet

    from gba_hvd.metrics.scores import exact_auc

    table = pyarrow.parquet.read_table(file)
    score, label = (table.column(name).to_numpy() for name in ("score", "label"))
    return {"auc": exact_auc(score, label), "samples": len(label)}


def headline(rows: Sequence[Row]) -> dict[str, Any]:
    """By dtype: AUC, the mean over the seeds; `lost`: of float32's; `lost_most`: of one seed."""
    exact = {row["seed"]: row["auc"] for row in rows if row["dtype"] == "float32"}
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        mine = [row for row in rows if row["dtype"] == dtype]
        if mine:
            lost = [exact[row["seed"]] - row["auc"] for row in mine]
            mean = sum(row["auc"] for row in mine) / len(mine)
            found[dtype] = {"auc": mean, "lost": sum(lost) / len(lost), "lost_most": max(lost)}
    goal = {"goal": GOAL, "is_met": found["int8"]["lost_most"] <= GOAL} if "int8" in found else None
    return {"by_dtype": found, "int8": goal}


def show(found: dict[str, Any]) -> None:
    columns = {"rows": "{dtype}", "AUC": "{auc:.6f}", "lost": "{lost:+.6f}", "lost, worst seed": "{lost_most:+.6f}"}
    lines = [{"dtype": dtype, **of} for dtype, of in found["by_dtype"].items()]
    measure.print_figures("AUC on Frappe's test samples", columns, lines)
    if found["int8"]:
        print(f"int8 may lose {GOAL}: {'met' if found['int8']['is_met'] else 'missed'}")
