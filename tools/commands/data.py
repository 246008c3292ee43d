"""`gba-hvd data prepare` and `gba-hvd data show`: arguments to a recipe, progress to the terminal.

What the columns become is decided in `gba_hvd.data`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput

from ..terminal import print_line
from .data_output import print_summary, shown_progress

if TYPE_CHECKING:
    from gba_hvd.data.recipe import Recipe, SplitFiles, SplitShares

    from .data_recipe import By

SPLITS = ("train", "valid", "test")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = subparsers.add_parser("data", help="prepare click logs for training, and look at them")
    commands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_prepare(commands)
    show = commands.add_parser("show", help="what a prepared dataset holds")
    show.add_argument("dataset", type=Path, metavar="DATASET", help="its folder")
    show.add_argument("--json", action="store_true", help="the whole manifest as JSON")
    show.add_argument("--verify", action="store_true", help="read every part and compare checksums")
    show.set_defaults(run=run_show)


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "prepare",
        help="turn TSV, CSV, Parquet or JSON-lines files into a dataset to train on",
        description="Turn text with any delimiter, JSON lines (both plain, gzip or zstd) or Parquet files into a "
        "dataset to train on. "
        "It is mapped, not loaded, and inputs may be larger than memory. "
        "Vocabularies and statistics are fitted on the train split only.",
    )
    parser.add_argument(
        "input",
        nargs="*",
        type=Path,
        help="files or folders, cut into splits; or one folder with files or folders named train, valid and test",
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the dataset; appears when all is done")
    parser.add_argument("--overwrite", action="store_true", help="replace the dataset that is there")

    parser.add_argument(
        "--like",
        type=Path,
        metavar="STORE",
        help="ids, means and deviations as in this dataset: for new data of a model that was trained on it",
    )

    columns = parser.add_argument_group("columns (a preset, or all by hand)")
    columns.add_argument("--preset", metavar="NAME", help="criteo-kaggle, criteo-1tb or frappe")
    columns.add_argument(
        "--format", choices=("csv", "tsv", "parquet", "jsonl"), help="default: what the input looks like"
    )
    columns.add_argument(
        "--delimiter", metavar="X", help="between columns: tab, comma, '::', ... (default: as it looks)"
    )
    columns.add_argument(
        "--header",
        action=argparse.BooleanOptionalAction,
        help="the first line has the columns' names (default: as it looks)",
    )
    names: dict[str, Any] = {"metavar": "A,B,...", "action": "append", "default": []}
    columns.add_argument("--columns", **names, help="names of the columns of a file without header, in order")
    columns.add_argument("--label", **names, help="0 or 1; several are several labels (default: label)")
    columns.add_argument("--label-from", metavar="N", type=float, help="labels are 1 from this number up")
    columns.add_argument("--rating", **names, help="labels that are numbers, kept as they are")
    columns.add_argument(
        "--categorical", **names, help='become ids of tables; "rest": all columns without another role'
    )
    columns.add_argument("--numeric", **names, help="become numbers of the dense input")
    columns.add_argument("--ignore", **names, help='columns left out on purpose, also by "rest"')
    columns.add_argument(
        "--timestamp",
        metavar="COLUMN[=FORMAT]",
        action="append",
        default=[],
        help="gives COLUMN_hour and COLUMN_weekday; unix, unix_ms, iso or a strptime pattern (default: as it looks)",
    )
    columns.add_argument(
        "--multi",
        metavar="FIELD[=SEPARATOR]",
        action="append",
        default=[],
        help="a multi-valued categorical field: separated text, or without separator a list of Parquet or JSON",
    )

    columns.add_argument(
        "--table",
        metavar="TABLE=A,B,...",
        action="append",
        default=[],
        help="fields that share a table and its vocabulary, such as a history and a candidate",
    )

    encoding = parser.add_argument_group("encoding")
    encoding.add_argument("--min-count", metavar="N", type=int, help="vocabulary of the values seen N times in train")
    encoding.add_argument("--hash-rows", metavar="N", type=int, help="hash every field into a table of N rows instead")
    encoding.add_argument("--hash", metavar="FIELD=ROWS", action="append", default=[], help="hash this field")
    encoding.add_argument(
        "--identity",
        metavar="FIELD=ROWS[:OFFSET]",
        action="append",
        default=[],
        help="values of this field are integers already; the id is value - OFFSET (default: 0)",
    )
    encoding.add_argument(
        "--transform", choices=("log", "none"), default="log", help="numeric: log(1+x) or as it is (default: log)"
    )
    encoding.add_argument(
        "--standardise",
        action="store_true",
        help="numeric: to mean 0 and deviation 1 of the values on train; a missing one is 0, the mean",
    )

    splits = parser.add_argument_group("splits")
    for split in SPLITS:
        what = f"files or folders of {split}"
        splits.add_argument(f"--{split}", type=Path, nargs="+", action="extend", metavar="PATH", help=what)
    splits.add_argument(
        "--split", metavar="A,B,C", type=_shares, help="shares of train,valid,test (default: 0.8,0.1,0.1)"
    )
    splits.add_argument(
        "--split-by", choices=("random", "order"), help="rows at random, or in their order (default: random)"
    )
    splits.add_argument("--seed", type=int, default=0, help="of the random split (default: 0)")
    parser.add_argument(
        "--max-bad-rows",
        metavar="X",
        type=float,
        default=0.001,
        help="stop past this share (below 1) or number (from 1) of malformed rows (default: 0.001)",
    )
    parser.set_defaults(run=run_prepare)


def _shares(text: str) -> dict[str, float]:
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= len(SPLITS):
        raise argparse.ArgumentTypeError(f"{text!r}: expected up to three numbers, as in 0.8,0.1,0.1")
    return {split: share for split, share in zip(SPLITS, shares, strict=False) if share}


def run_prepare(args: argparse.Namespace) -> int:
    from gba_hvd.data import prepare

    from .data_recipe import recipe_of

    started = time.monotonic()
    try:
        given = [path for split in SPLITS for path in getattr(args, split) or []]
        if not (given or args.input):
            raise BadInput("no input: name files or folders, or --train, --valid and --test")
        recipe, split_by = recipe_of(args, given or args.input)
        source = _source(args, recipe, split_by)
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from error
    with shown_progress() as on_progress:
        manifest = prepare(
            recipe, source, args.out, overwrite=args.overwrite, like=args.like, max_bad_rows=args.max_bad_rows,
            on_progress=on_progress,
        )  # fmt: skip
    print_summary(args.out, manifest)
    if missing := [split for split in SPLITS if split not in manifest["splits"]]:
        print_line(f"no split {' and '.join(missing)}: examples/train_ctr.py needs it, your own script may not")
    rows = sum(split["rows"] for split in manifest["splits"].values())
    seconds = time.monotonic() - started
    print_line(f"{rows:,} rows in {seconds:.1f} s ({rows / seconds:,.0f} rows/s)")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from gba_hvd.data.store import read_manifest, verify

    manifest = read_manifest(args.dataset)
    try:
        if args.json:
            print(json.dumps(manifest, indent=1))
        else:
            print_summary(args.dataset, manifest)
        flaws = verify(args.dataset) if args.verify else []
    except (KeyError, TypeError) as error:
        raise BadInput(f"{args.dataset}: its dataset.json lacks {error}; prepare the dataset again") from error
    for flaw in flaws:
        print_line(flaw, file=sys.stderr)
    if args.verify and not flaws:
        print_line("every part is as it was written", file=sys.stderr)
    return 1 if flaws else 0


def _source(args: argparse.Namespace, recipe: Recipe, split_by: By | None) -> SplitFiles | SplitShares:
    from gba_hvd.data.recipe import SplitFiles, SplitShares
    from gba_hvd.data.sources import files_by_split, shown

    given = {split: paths for split in SPLITS if (paths := getattr(args, split))}
    if given:
        if args.input or args.split or args.split_by:
            raise BadInput(
                "--train, --valid and --test name the files of each split: leave out INPUT, --split and --split-by"
            )
        return SplitFiles(given)
    named: dict[str, list[Path]] = {}
    if len(args.input) == 1 and args.input[0].is_dir() and not (args.split or args.split_by):
        named, notes = files_by_split(args.input[0], recipe.format)
        if notes:
            print_line(f"not read: {shown(notes)}", file=sys.stderr)
    if named:
        return SplitFiles(named)
    if split_by is None and not args.split:
        raise BadInput(f"{args.input[0]}: expected a folder with files named train, valid and test, or --split")
    shares = args.split or {"train": 0.8, "valid": 0.1, "test": 0.1}
    return SplitShares(args.input, shares, args.split_by or split_by or "random", args.seed)
