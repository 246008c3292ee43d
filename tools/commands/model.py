"""`gba-hvd model`: a model that predicts, made from a checkpoint: score files, serve it, log it, check and compare it.

What a model consists of is in `gba_hvd.serving`; the terminal is here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gba_hvd.errors import BadInput

from ..checkpoint.store_argument import options_of, store_of
from ..terminal import print_line, print_table, progress

if TYPE_CHECKING:
    from gba_hvd.serving.follower import Update
    from gba_hvd.serving.load import OpenModel
    from gba_hvd.serving.manifest import ModelManifest
    from recovery.restore.open_checkpoint import OpenCheckpoint
    from recovery.storage.store import Store


_REPAIR = (
    "To repair them: in a store, delete them first; then save or export the same model at this URL again (in a local "
    "folder that writes them again). Without it, use another version"
)

# A store that is down fails a request before MLflow's server ends it (MLFLOW_SCORING_SERVER_REQUEST_TIMEOUT: 60 s).
_PATIENCE = {"tries": 2, "timeout_s": 10.0}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    model = subparsers.add_parser(
        "model",
        help="export a model from a checkpoint, predict, serve, log, verify, compare or withdraw versions, tidy up",
    )
    commands = model.add_subparsers(title="commands", metavar="COMMAND", required=True)
    export = _add(commands, "export", "make a model from a checkpoint, as a new version at a URL")
    export.add_argument(
        "source", metavar="SOURCE", help="URL of the checkpoints of a job, or its MLflow run (id, name)"
    )
    export.add_argument("url", metavar="URL", help="where the model goes")
    option = "for the store of the checkpoints; may be given several times (--option: of the model)"
    export.add_argument("--source-option", action="append", default=[], metavar="KEY=VALUE", help=option)
    export.add_argument("--build", required=True, metavar="WHAT", help="package.module:callable, or file.py:callable")
    called = "what it is called with, as one JSON object (default: {})"
    export.add_argument("--arguments", default="{}", metavar="JSON", help=called)
    export.add_argument(
        "--example",
        metavar="WHAT",
        help="a callable as in --build that returns an input of the model; finds modules beside its file. Without it "
        "the fields of a request are not stored, so `predict` and `serve` refuse the model",
    )
    names = "of the columns of Batch.dense, in their order: a request may give them by name; needs --example"
    export.add_argument("--dense-names", nargs="+", default=[], metavar="NAME", help=names)
    encoder = "folder of the prepared dataset that the job was trained on: its vocabularies are stored with the model, "
    encoder += "and requests hold raw values; needs --example"
    export.add_argument("--encoder", type=Path, metavar="STORE", help=encoder)
    _add_hashed(export)
    which = export.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint that CheckpointCallback(keep_best=) keeps")
    export.add_argument(
        "--tables", choices=("all", "touched"), default="all", help="rows: all, or those that changed (default: all)"
    )
    export.add_argument(
        "--activation", choices=("none", "sigmoid"), default="none", help="of predictions (default: none)"
    )
    dense = (
        "also store the dense part as a program of torch.export (torch, the default) or ONNX; needs --example, of two"
    )
    dense += " samples or more"
    formats = ("torch", "onnx")
    export.add_argument("--dense-program", nargs="*", choices=formats, metavar="FORMAT", help=dense)
    export.add_argument("--tracking-uri", metavar="URI", help="of the run (default: MLflow's own, MLFLOW_TRACKING_URI)")
    export.set_defaults(run=run_export)
    predict = _add(commands, "predict", "write the scores of the samples in a file")
    _add_url(predict)
    files = "FILE.parquet, FILE.csv, FILE.tsv or FILE.jsonl (JSON lines); all but the first also .gz, .zst"
    predict.add_argument("input", type=Path, metavar="INPUT", help=files)
    predict.add_argument("--out", type=Path, required=True, metavar="FILE", help="FILE.parquet, FILE.csv or FILE.jsonl")
    predict.add_argument("--keep", nargs="+", default=[], metavar="COLUMN", help="columns of the input to copy")
    _add_encoded(predict)
    predict.add_argument("--batch", type=int, default=4096, metavar="N", help="samples at a time (default: 4096)")
    _add_rows(predict)
    _add_version(predict)
    predict.set_defaults(run=_with_downloads(run_predict))
    serve = _add(commands, "serve", "answer requests over HTTP as `mlflow models serve` does, until SIGTERM")
    _add_url(serve)
    serve.add_argument("--host", default="127.0.0.1", help="to listen on (default: 127.0.0.1, this machine alone)")
    serve.add_argument("--port", type=int, default=5001, metavar="N", help="0: a free one (default: 5001)")
    follow = "checkpoints of the job that trains the model: each new one is taken over between two requests"
    serve.add_argument("--follow", metavar="URL", help=follow)
    option = "for the store of --follow; may be given several times (--option: of the model)"
    serve.add_argument("--follow-option", action="append", default=[], metavar="KEY=VALUE", help=option)
    _add_encoded(serve)
    _add_rows(serve)
    _add_version(serve)
    serve.set_defaults(run=_with_downloads(run_serve))
    log = _add(commands, "log", "log a saved model in MLflow, with the run of its job or a new one, and register it")
    log.add_argument("url", metavar="URL", help="of the model")
    log.add_argument("--name", required=True, help="of the logged model")
    log.add_argument("--registered-model-name", metavar="NAME", help="of the registry, which gets a new version")
    log.add_argument("--alias", help="of that version")
    log.add_argument(
        "--run", dest="run_name", metavar="RUN", help="id or name of a run, or its job (default: a new run)"
    )
    experiment = "of a new run (default: MLFLOW_EXPERIMENT_NAME, else that of MLFLOW_EXPERIMENT_ID, else gba-hvd)"
    log.add_argument("--experiment", metavar="NAME", help=experiment)
    log.add_argument("--tracking-uri", metavar="URI", help="default: MLflow's own, MLFLOW_TRACKING_URI")
    more = "further ones, such as a package that the builder imports: my-models==1.2"
    log.add_argument("--requirements", nargs="+", default=[], metavar="PACKAGE", help=more)
    _add_version(log)
    log.set_defaults(run=run_log)
    verify = _add(commands, "verify", "read every byte of a version and compare checksums; names all that is damaged")
    _add_url(verify)
    _add_version(verify)
    verify.set_defaults(run=_with_downloads(run_verify))
    diff = _add(commands, "diff", "which rows and tensors differ between two versions")
    _add_url(diff)
    old = "number of a version; may be left out for an address of MLflow, which has one version"
    diff.add_argument("old", type=int, metavar="OLD", nargs="?", help=old)
    diff.add_argument("new", type=int, metavar="NEW", nargs="?", help="default: the newest")
    diff.add_argument("--new-url", metavar="URL", help="where the new version is, as URL (default: the same)")
    diff.add_argument(
        "--new-option", action="append", default=[], metavar="KEY=VALUE", help="for the store of --new-url"
    )
    diff.set_defaults(run=_with_downloads(run_diff))

    rollback = _add(commands, "rollback", "go back to a version: what would go, or with --yes withdraw those after it")
    rollback.description = (
        "Make an earlier version the newest again: it is checked, those after it are withdrawn, and their numbers are "
        "not used again. Refused while a save completes a version. Without --yes nothing is changed."
    )
    rollback.add_argument("url", metavar="URL", help="of the model")
    rollback.add_argument("version", type=int, metavar="VERSION", help="that is to be the newest")
    rollback.add_argument("--yes", action="store_true", help="do it, after every byte of the version was checked")
    waits = "with --yes: no process saves or deletes there; what killed ones left, for which others wait, goes first"
    rollback.add_argument("--force", action="store_true", help=waits)
    rollback.set_defaults(run=run_rollback)
    gc = _add(commands, "gc", "objects that no version names, and old versions: list them, or with --yes delete them")
    gc.add_argument("url", metavar="URL", help="of the model")
    keep = "also versions but the newest N, whose readers fail then (default: all versions are kept)"
    gc.add_argument("--keep-last", type=int, metavar="N", help=keep)
    gc.add_argument("--yes", action="store_true", help="delete them")
    gc.add_argument("--force", action="store_true", help=waits)
    gc.set_defaults(run=run_gc)


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, does: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=does, description=does[0].upper() + does[1:] + ".")
    option = "for the store, as endpoint_url=http://...; may be given several times"
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_url(parser: argparse.ArgumentParser) -> None:
    what = (
        "of the model, or its address in MLflow: models:/NAME/VERSION, models:/NAME@ALIAS, models:/ID, runs:/RUN/NAME"
    )
    parser.add_argument("url", metavar="URL", help=what)
    where = "of an address in MLflow (default: MLflow's own, MLFLOW_TRACKING_URI)"
    parser.add_argument("--tracking-uri", metavar="URI", help=where)


def _with_downloads(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """`run` with a folder in place of each address of MLflow. asked: the URLs as they were given, in their order;
    named: the first, with the version of the registry in place of an alias."""

    def downloading(args: argparse.Namespace) -> int:
        with contextlib.ExitStack() as stack:
            args.asked = [url for url in (args.url, getattr(args, "new_url", None)) if url is not None]
            _check_addresses(args)
            args.named = _pinned(args.url, args.tracking_uri)
            args.url = _local(args.named, args.tracking_uri, stack)
            if getattr(args, "new_url", None) is not None:
                args.new_url = _local(args.new_url, args.tracking_uri, stack)
            return run(args)

    return downloading


def _check_addresses(args: argparse.Namespace) -> None:
    """Raises BadInput for options that an address, or a URL, has no use for."""
    from gba_hvd.serving.logged_model import is_address

    if args.tracking_uri is not None and not any(is_address(url) for url in args.asked):
        raise BadInput("--tracking-uri is for an address in MLflow (models:/... or runs:/...), and none is given")
    for url, options in zip(args.asked, (args.option, getattr(args, "new_option", [])), strict=False):
        if is_address(url) and options:
            raise BadInput(
                f"--option {options[0]} is for the store of a model, and MLflow downloads {url}: leave it out"
            )


def _pinned(url: str, tracking_uri: str | None) -> str:
    from gba_hvd.serving.logged_model import is_alias, version_of_alias

    if not is_alias(url):
        return url
    with _mlflow_in_one_line():
        return version_of_alias(url, tracking_uri)


def _local(url: str, tracking_uri: str | None, stack: contextlib.ExitStack) -> str:
    """A folder with the model of an address, for as long as `stack` is open; any other URL as it is."""
    from gba_hvd.serving.logged_model import downloaded, is_address

    if not is_address(url):
        return url
    with _mlflow_in_one_line():
        return str(stack.enter_context(downloaded(url, tracking_uri)))


def _add_hashed(parser: argparse.ArgumentParser) -> None:
    hashed = "columns of strings that are ids of hashed tables: hashed as ParquetStream(hashed=...) does"
    parser.add_argument("--hashed", nargs="+", default=[], metavar="COLUMN", help=hashed)


def _add_encoded(parser: argparse.ArgumentParser) -> None:
    _add_hashed(parser)
    encoded = "samples have ids and numbers, not raw values, also where the model makes these of raw values"
    parser.add_argument("--encoded", action="store_true", help=encoded)


def _add_rows(parser: argparse.ArgumentParser) -> None:
    where = "rows: read all into memory (default), map those of a local folder, or read from the store what is needed. "
    where += "Mapped ones are not verified: run `gba-hvd model verify`; replace files, never write into them"
    parser.add_argument("--tables", choices=("memory", "mmap", "remote"), help=where)
    parser.add_argument("--mmap", action="store_const", dest="tables", const="mmap", help="the same as --tables mmap")
    cache = "of --tables remote: most bytes of rows kept in memory, at least 1048576 (default: 256 MiB)"
    parser.add_argument("--cache-bytes", type=int, metavar="N", help=cache)
    dtypes = ("float32", "int8", "bfloat16")
    parser.add_argument("--row-dtype", choices=dtypes, default="float32", help="of rows in memory (default: float32)")


def _add_version(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--version", type=int, metavar="N", help="default: the newest")


def run_export(args: argparse.Namespace) -> int:
    from gba_hvd.serving.save import described_vocabularies, export_model
    from recovery.restore.open_checkpoint import open_checkpoint

    try:
        arguments = json.loads(args.arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"it is {type(arguments).__name__}")
    except ValueError as error:
        raise BadInput(f"--arguments must be one JSON object, such as '{{\"dim\": 16}}': {error}") from error
    if args.dense_program is not None and args.example is None:
        raise BadInput("--dense-program needs --example, by which the model is traced")
    formats = () if args.dense_program is None else args.dense_program or ("torch",)
    example = None if args.example is None else _example(args.example)
    opened = open_checkpoint(
        store_of(_checkpoints_of(args.source, args.tracking_uri), args.source_option),
        "best" if args.best else "newest" if args.step is None else args.step,
    )
    total = sum(4 * about.n_rows * about.dim for about in opened.tables.values())
    with progress("exporting", total) as on_bytes:
        saved = export_model(
            opened, args.url, tables=args.tables, build=args.build, arguments=arguments, input_example=example,
            dense_names=args.dense_names, encoder=args.encoder, hashed=args.hashed,
            activation=args.activation, dense_program=formats, on_bytes=on_bytes, **options_of(args.option),
        )  # fmt: skip
    if example is None:
        print_line(
            "without --example the fields of a request are not stored: `gba-hvd model predict` and `serve` refuse "
            "this model, and only code of your own can call what gba_hvd.load_for_inference returns",
            file=sys.stderr,
        )
    if args.json:
        print(
            json.dumps({**vars(saved), "checkpoint": opened.name, "step": opened.step, **_best_facts(opened)}, indent=2)
        )
        return 0
    print_line(
        f"{saved.url}: version {saved.version} of {opened.name} (step {opened.step:,}), {saved.n_rows:,} rows, "
        f"{saved.n_bytes:,} bytes; {saved.new_shards:,} shards were new ({saved.new_bytes:,} bytes)"
    )
    if (best := opened.best) is not None:
        print_line(
            f"the best model{' that is saved' * bool(best.unsaved)}: {best.words}"
            + f"; {best.ahead}" * bool(best.ahead)
        )
    if args.encoder is not None:
        print_line(described_vocabularies(saved))
    return 0


def _best_facts(opened: OpenCheckpoint) -> dict[str, Any]:
    best = opened.best
    if best is None:
        return {}
    facts = {"best_metric": best.metric, "best_value": best.value, "best_step": best.step}
    return {**facts, "best_unsaved": None if best.unsaved is None else vars(best.unsaved)}


def _example(named: str) -> Any:
    """An input of the model. Of a file, modules beside it are found, as when Python runs it: it is not stored.

    Nothing stays that the model could import then, which has to be built without.
    """
    from gba_hvd.serving.builder import Builder

    builder = Builder.of_example(named)
    if builder.code is None:
        return builder.call()
    folder, known = Path(named.rpartition(":")[0]).resolve().parent, set(sys.modules)
    if str(folder) in sys.path:  # what is there can be imported in any case
        return builder.call()
    sys.path.insert(0, str(folder))
    try:
        return builder.call()
    finally:
        sys.path.remove(str(folder))
        new = set(sys.modules) - known
        beside = {name for name in new if _is_beside(folder, name)} | {builder.module_name}
        for name in new:
            if name.partition(".")[0] in beside:
                del sys.modules[name]


def _is_beside(folder: Path, name: str) -> bool:
    """Whether an imported module is FOLDER/NAME.py or the package FOLDER/NAME; not one of an environment in there."""
    file = getattr(sys.modules[name], "__file__", None)
    return file is not None and Path(file).parent in (folder, folder / name)


def run_predict(args: argparse.Namespace) -> int:
    from gba_hvd.serving.sample_files import n_samples
    from gba_hvd.serving.score_file import score_file

    model = _open_model(args)
    with progress("predicting", n_samples(args.input), "samples") as on_samples:
        n = score_file(
            model,
            args.input,
            args.out,
            keep=args.keep,
            hashed=args.hashed,
            batch=args.batch,
            encoded=args.encoded,
            on_samples=on_samples,
        )
    if args.json:
        print(json.dumps({"out": str(args.out), "samples": n, "version": model.manifest.version}, indent=2))
    else:
        print_line(f"{args.out}: scores of {n:,} samples, by version {model.manifest.version}")
    return 0


def run_serve(args: argparse.Namespace) -> int:
    from gba_hvd.serving.follower import Follower
    from gba_hvd.serving.http_server import app_of, bound, healthy_unless, serve

    if args.follow_option and args.follow is None:
        raise BadInput("--follow-option is for the store of --follow, which is not given")
    if not 0 <= args.port < 1 << 16:
        raise BadInput(f"--port must be 0 to 65535, got {args.port}")
    with bound(args.host, args.port) as listening, contextlib.ExitStack() as stack:
        model = _open_model(args, **_PATIENCE if args.tables == "remote" else {})
        if args.follow is None:
            app = app_of(model, args.hashed, args.encoded)
        else:
            follower = Follower(model, args.follow, on_update=_show_update, **options_of(args.follow_option))
            app = app_of(model, args.hashed, args.encoded, follower.reading)
            app = healthy_unless(app, lambda: follower.has_ended, lambda: follower.problem)
            stack.enter_context(follower)
        host, port = listening.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if args.json:
            about = {"url": address, "version": model.manifest.version, "model": args.named}
            print(json.dumps(about), flush=True)
        else:
            print_line(f"{_served(args, model.manifest.version)}: POST {address}/invocations", flush=True)
        with contextlib.suppress(KeyboardInterrupt):  # of the signal that ended it
            serve(app, listening)
    return 0


def _served(args: argparse.Namespace, version: int) -> str:
    """An address in MLflow has the registry's number, not the model's own."""
    from gba_hvd.serving.logged_model import is_address

    if not is_address(args.named):
        return f"version {version} of {args.named}"
    return f"{args.named} ({args.asked[0]})" if args.named != args.asked[0] else str(args.named)


def _show_update(update: Update) -> None:
    """One line, beside the output of `--json`."""
    with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the disk is full; updates continue
        print_line(
            f"step {update.step:,}: {update.n_rows:,} rows, {update.n_bytes / 1e6:.1f} MB in {update.seconds:.2f} s, "
            f"{update.lag_s:.1f} s after it was saved",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def run_log(args: argparse.Namespace) -> int:
    from gba_hvd.serving.log_saved import log_saved_model
    from gba_hvd.serving.logged_model import is_address

    if args.run_name is not None and args.experiment is not None:
        raise BadInput("--experiment is of a new run, and --run names one: leave out one of the two")
    if is_address(args.url):
        raise BadInput(f"{args.url} is in MLflow already: mlflow.register_model gives it another name there")
    _, manifest = _opened(args, _version(args))
    with _mlflow_in_one_line(), progress("copying", manifest.n_bytes) as on_bytes:
        logged = log_saved_model(
            args.url, name=args.name, registered_model_name=args.registered_model_name, alias=args.alias,
            run=args.run_name, experiment=args.experiment, version=manifest.version, requirements=args.requirements,
            tracking_uri=args.tracking_uri, on_bytes=on_bytes, **options_of(args.option),
        )  # fmt: skip
    if args.json:
        print(json.dumps(vars(logged), indent=2))
        return 0
    served = f"models:/{args.registered_model_name}/{logged.version}" if logged.version else logged.model_uri
    alias = f", models:/{args.registered_model_name}@{args.alias}" if args.alias else ""
    of_step = "" if logged.step is None else f" of step {logged.step:,}"
    print_line(f"run {logged.run_id}: version {manifest.version}{of_step} is {served}{alias}")
    if logged.alias_move:
        print_line(logged.alias_move)
    return 0


@contextlib.contextmanager
def _mlflow_in_one_line() -> Iterator[None]:
    """Raises BadInput where MLflow refuses, or does not answer after one more try (its own rule: for minutes)."""
    from recovery.redaction import redacted

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        raise BadInput(f"MLflow: {redacted(' '.join(str(error).split()))}") from error


def run_verify(args: argparse.Namespace) -> int:
    from gba_hvd.serving.compare import verify_model

    store, manifest = _opened(args, _version(args))
    with progress("checking", manifest.n_bytes) as on_bytes:
        flaws = verify_model(store, manifest, on_bytes)
    if args.json:
        print(json.dumps({"url": store.url, "version": manifest.version, "ok": not flaws, "flaws": flaws}, indent=2))
        return int(bool(flaws))
    for flaw in flaws:
        print_line(flaw)
    found = f"{len(flaws)} objects are DAMAGED. {_REPAIR}" if flaws else f"{manifest.n_bytes:,} bytes ok"
    print_line(f"version {manifest.version}: {found}")
    return int(bool(flaws))


def run_diff(args: argparse.Namespace) -> int:
    from gba_hvd.serving.compare import diff_models
    from gba_hvd.serving.logged_model import is_address
    from gba_hvd.serving.manifest import read_manifest

    if args.new_option and args.new_url is None:
        raise BadInput("--new-option is for the store of --new-url, which is not given")
    if args.old is None and not is_address(args.asked[0]):
        raise BadInput("which version is the old one? gba-hvd model diff URL OLD [NEW]")
    store, old = _opened(args, "newest" if args.old is None else args.old)
    new_store = store if args.new_url is None else store_of(args.new_url, args.new_option)
    new = read_manifest(new_store, "newest" if args.new is None else args.new)
    found = diff_models(store, old, new, new_store)
    if args.json:
        tables = [vars(table) for table in found.tables]
        about: dict[str, Any] = {"from": old.version, "to": new.version, "tables": tables}
        print(json.dumps({**about, "tensors": found.tensors, "other": list(found.other)}, indent=2))
        return 0
    print_line(f"version {old.version} to {new.version}" + (f" of {args.asked[1]}" if args.new_url else ""))
    rows = [
        (
            t.table,
            *(f"{n:,}" for n in (t.n_rows, t.changed, t.added, t.removed, t.shared)),
            f"{t.new_shards} of {t.n_shards}",
            f"{t.new_bytes:,}",
            t.note,
        )
        for t in found.tables
    ]
    headings = ("table", "rows", "changed", "added", "removed", "shared changed", "new shards", "bytes", "")
    print_table(headings, rows, left=(0, 8))
    for name, text in found.tensors.items():
        print_line(f"{name}: {text}")
    for line in found.other:
        print_line(line)
    return 0


def run_rollback(args: argparse.Namespace) -> int:
    from gba_hvd.serving.manifest import remove_marks
    from gba_hvd.serving.withdrawal import plan_withdrawal, withdraw

    store = store_of(args.url, args.option)
    if _force(args):
        remove_marks(store)
    plan = plan_withdrawal(store, args.version)
    if args.yes:
        _require_whole(store, plan.to)
        withdraw(store, plan)
    if args.json:
        known = {one.version: one for one in plan.manifests}
        gone = [{"version": one, "step": known[one].source.get("step") if one in known else None} for one in plan.later]
        about = {"url": store.url, "to": plan.to.version, "step": plan.to.source.get("step")}
        print(json.dumps({**about, "done": args.yes, "withdrawn": gone}, indent=2))
        return 0
    for one in plan.manifests:
        print_line(_described(one))
    n, kept = len(plan.later), _described(plan.to)
    these = f"{n} later version{'s' * (n > 1)} ({', '.join(map(str, plan.later))})"
    if not args.yes:
        print_line(f"{these}, to be withdrawn; {kept}, becomes the newest: add --yes to do it")
        return 0
    print_line(
        f"{these} withdrawn. The newest is {kept}: what opens the model from now on takes it. Processes that have a "
        "later one open keep it until they are started again; its objects stay until `gba-hvd model gc URL --yes`"
    )
    return 0


def _described(manifest: ModelManifest) -> str:
    step = manifest.source.get("step")
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.saved_unix_s))
    return f"version {manifest.version}, saved {saved}" + (f", of step {step:,}" if isinstance(step, int) else "")


def _force(args: argparse.Namespace) -> bool:
    if args.force and not args.yes:
        raise BadInput("--force only comes with --yes: without it nothing is deleted")
    return bool(args.force)


def _require_whole(store: Store, manifest: ModelManifest) -> None:
    """Raises Damaged, naming what is wrong with the version."""
    from gba_hvd.serving.compare import verify_model
    from recovery.errors import Damaged

    with progress("checking", manifest.n_bytes) as on_bytes:
        flaws = verify_model(store, manifest, on_bytes)
    if flaws:
        more = f", and {len(flaws) - 1} more" if len(flaws) > 1 else ""
        raise Damaged(f"nothing was changed: {flaws[0]}{more}. Go back to another version")


def run_gc(args: argparse.Namespace) -> int:
    from gba_hvd.serving.old_versions import delete_unneeded, unneeded

    store, force = store_of(args.url, args.option), _force(args)
    found = delete_unneeded(store, args.keep_last, force=force) if args.yes else unneeded(store, args.keep_last)
    if args.json:
        about = {"url": store.url, "deleted": args.yes, "versions": found.versions, "kept": found.kept}
        print(json.dumps({**about, "n_bytes": found.n_bytes, "objects": dict(found.objects)}, indent=2))
        return 0
    gone = f"versions {', '.join(map(str, found.versions))}, " if found.versions else ""
    what = f"{gone}{len(found.objects):,} objects that no version names{' then' * bool(gone)}, {found.n_bytes:,} bytes"
    done = " deleted" if args.yes else ", to be deleted: add --yes to do it"
    kept = ", ".join(map(str, found.kept))
    print_line(
        f"{what}{done * bool(found.versions or found.objects)} (kept: version{'s' * (len(found.kept) > 1)} {kept})"
    )
    return 0


def _open_model(args: argparse.Namespace, **patience: Any) -> OpenModel:
    """patience: with the store, where no --option says otherwise."""
    from gba_hvd.serving.load import open_model

    return open_model(
        args.url, version=_version(args), tables=args.tables or "memory", row_dtype=args.row_dtype,
        cache_bytes=args.cache_bytes, **{**patience, **options_of(args.option)},
    )  # fmt: skip


def _version(args: argparse.Namespace) -> int | str:
    return "newest" if args.version is None else int(args.version)


def _opened(args: argparse.Namespace, version: int | str) -> tuple[Store, ModelManifest]:
    from gba_hvd.serving.manifest import read_manifest

    store = store_of(args.url, args.option)
    return store, read_manifest(store, version)


def _checkpoints_of(source: str, tracking_uri: str | None) -> str:
    """The URL of checkpoints, or that where a run saved its newest one."""
    from gba_hvd.serving.logged_model import is_address

    if is_address(source):
        raise BadInput(f"{source} is a model, and export makes one of checkpoints: give their URL, or the job's run")
    if "://" in source or "/" in source or Path(source).exists():
        return source
    from gba_hvd.tracking.find_run import read
    from gba_hvd.tracking.recovery_records import pointers
    from gba_hvd.tracking.sender_process import prepare_process

    prepare_process()
    saved = pointers(read(source, tracking_uri).events)
    if not saved or not saved[-1]["url"]:
        raise BadInput(f"run {source!r} has saved no checkpoint: a CheckpointCallback makes them")
    return str(saved[-1]["url"])
