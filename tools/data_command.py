"""`gba-hvd data prepare` and `gba-hvd data show`: arguments to a recipe, progress to the terminal.

What the columns become is decided in `gba_hvd.data`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .data_report import print_summary, shown_progress

if TYPE_CHECKING:
    from gba_hvd.data.recipe import Encoding, Recipe, SplitFiles, SplitShares

By = Literal["random", "order"]
SPLITS = ("train", "valid", "test")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    data = subparsers.add_parser("data", help="prepare click logs for training, and look at them")
    commands = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_prepare(commands)
    show = commands.add_parser("show", help="what a prepared dataset holds")
    show.add_argument("dataset", type=Path)
    show.add_argument("--json", action="store_true", help="the whole manifest as JSON")
    show.add_argument("--verify", action="store_true", help="read every part and compare checksums")
    show.set_defaults(run=run_show)


def _add_prepare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "prepare",
        help="turn TSV, CSV or Parquet files into a dataset to train on",
        description="Turn TSV, CSV or Parquet files (text also packed with gzip or zstd) into a dataset to train on. "
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

    columns = parser.add_argument_group("columns (a preset, or all by hand)")
    columns.add_argument("--preset", metavar="NAME", help="criteo-kaggle, criteo-1tb or frappe")
    columns.add_argument("--format", choices=("csv", "parquet"), default="csv", help="default: csv, with a header")
    columns.add_argument("--label", metavar="COLUMN", default="label", help="0 or 1; default: label")
    columns.add_argument("--categorical", metavar="A,B,...", type=_names, action="extend", default=[])
    columns.add_argument("--numeric", metavar="A,B,...", type=_names, action="extend", default=[])
    columns.add_argument(
        "--multi",
        metavar="FIELD[=SEPARATOR]",
        action="append",
        default=[],
        help="a multi-valued categorical field: separated text, or without separator a Parquet list",
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
        help="values of this field are integers already; the id is value - OFFSET (default 0)",
    )
    encoding.add_argument("--transform", choices=("log", "none"), default="log", help="numeric: log(1+x) or as it is")
    encoding.add_argument("--standardise", action="store_true", help="numeric: to mean 0 and deviation 1 on train")

    splits = parser.add_argument_group("splits")
    for split in SPLITS:
        what = f"files or folders of {split}"
        splits.add_argument(f"--{split}", type=Path, nargs="+", action="extend", metavar="PATH", help=what)
    splits.add_argument(
        "--split", metavar="A,B,C", type=_shares, help="shares of train,valid,test; default 0.8,0.1,0.1"
    )
    splits.add_argument("--split-by", choices=("random", "order"), help="rows at random, or in their order")
    splits.add_argument("--seed", type=int, default=0, help="of the random split; default 0")
    parser.add_argument(
        "--max-bad-rows",
        metavar="X",
        type=float,
        default=0.001,
        help="stop past this share (below 1) or number (from 1) of malformed rows; default 0.001",
    )
    parser.set_defaults(run=run_prepare)


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


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
    from gba_hvd.errors import BadInput

    started = time.monotonic()
    try:
        recipe, split_by = _recipe(args)
        source = _source(args, recipe, split_by)
    except BadInput:
        raise
    except ValueError as error:
        raise BadInput(str(error)) from error
    with shown_progress() as on_progress:
        manifest = prepare(
            recipe,
            source,
            args.out,
            overwrite=args.overwrite,
            max_bad_rows=args.max_bad_rows,
            on_progress=on_progress,
        )
    print_summary(args.out, manifest)
    rows = sum(split["rows"] for split in manifest["splits"].values())
    seconds = time.monotonic() - started
    print(f"{rows:,} rows in {seconds:.1f} s ({rows / seconds:,.0f} rows/s)")
    return 0


def run_show(args: argparse.Namespace) -> int:
    from gba_hvd.data.store import read_manifest, verify
    from gba_hvd.errors import BadInput

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
        print(flaw, file=sys.stderr)
    if args.verify and not flaws:
        print("every part is as it was written", file=sys.stderr)
    return 1 if flaws else 0


def _recipe(args: argparse.Namespace) -> tuple[Recipe, By | None]:
    """The recipe, and how the preset cuts one input into splits (None: it has a file per split)."""
    from gba_hvd.data.presets import PRESETS
    from gba_hvd.data.recipe import Categorical, Numeric, Recipe, Vocabulary
    from gba_hvd.errors import BadInput

    if args.preset is not None:
        if args.preset not in PRESETS:
            near = get_close_matches(args.preset, PRESETS, n=1) or list(PRESETS)
            raise BadInput(f"--preset {args.preset}: no such preset; there is {', '.join(near)}")
        by_hand = {"--categorical": args.categorical, "--numeric": args.numeric, "--multi": args.multi}
        by_hand |= {"--hash": args.hash, "--identity": args.identity, "--standardise": args.standardise}
        by_hand |= {"--transform": args.transform != "log", "--format": args.format != "csv"}
        by_hand |= {"--label": args.label != "label"}
        if given := [flag for flag, value in by_hand.items() if value]:
            raise BadInput(f"--preset {args.preset} names the columns already: leave out {', '.join(given)}")
        preset = PRESETS[args.preset]
        return preset.recipe(_default_encoding(args, preset.encoding)), preset.split_by

    default = _default_encoding(args, Vocabulary(min_count=1))
    encodings = _field_encodings(args)
    multi = {name: separator if given else None for name, given, separator in (m.partition("=") for m in args.multi)}
    names = list(dict.fromkeys([*args.categorical, *multi, *encodings]))
    if not names:
        raise BadInput("no --preset, and no columns: name at least --label and --categorical")
    categorical = tuple(
        Categorical(name, encodings.get(name, default), multi.get(name), name in multi and multi[name] is None)
        for name in names
    )
    numeric = tuple(Numeric(name, args.transform, args.standardise) for name in args.numeric)
    return Recipe(format=args.format, label=args.label, categorical=categorical, numeric=numeric), "random"


def _default_encoding(args: argparse.Namespace, default: Encoding) -> Encoding:
    from gba_hvd.data.recipe import Hashed, Vocabulary
    from gba_hvd.errors import BadInput

    if args.hash_rows is not None and args.min_count is not None:
        raise BadInput("--hash-rows and --min-count: choose one, a hash has no vocabulary")
    if args.hash_rows is not None:
        return Hashed(args.hash_rows)
    return default if args.min_count is None else Vocabulary(args.min_count)


def _field_encodings(args: argparse.Namespace) -> dict[str, Encoding]:
    from gba_hvd.data.recipe import Hashed, Identity
    from gba_hvd.errors import BadInput

    encodings: dict[str, Encoding] = {}
    try:
        for text in args.hash:
            name, rows = text.split("=")
            encodings[name] = Hashed(int(rows))
        for text in args.identity:
            name, size = text.split("=")
            rows, _, offset = size.partition(":")
            encodings[name] = Identity(int(rows), int(offset or 0))
    except ValueError as error:
        raise BadInput(f"{text}: expected FIELD=ROWS, for --identity also FIELD=ROWS:OFFSET ({error})") from error
    return encodings


def _source(args: argparse.Namespace, recipe: Recipe, split_by: By | None) -> SplitFiles | SplitShares:
    from gba_hvd.data.recipe import SplitFiles, SplitShares
    from gba_hvd.data.sources import files_by_split
    from gba_hvd.errors import BadInput

    given = {split: paths for split in SPLITS if (paths := getattr(args, split))}
    if given:
        if args.input or args.split or args.split_by:
            raise BadInput(
                "--train, --valid and --test name the files of each split: leave out INPUT, --split and --split-by"
            )
        return SplitFiles(given)
    if not args.input:
        raise BadInput("no input: name files or folders, or --train, --valid and --test")
    named = {}
    if len(args.input) == 1 and args.input[0].is_dir() and not (args.split or args.split_by):
        named = files_by_split(args.input[0], recipe.format)
    if named:
        return SplitFiles(named)
    if split_by is None and not args.split:
        raise BadInput(f"{args.input[0]}: expected a folder with files named train, valid and test, or --split")
    shares = args.split or {"train": 0.8, "valid": 0.1, "test": 0.1}
    return SplitShares(args.input, shares, args.split_by or split_by or "random", args.seed)
