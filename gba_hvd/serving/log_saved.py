"""A saved model, at a URL, in MLflow: logged with a run that is over, or with one of its own, and registered."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gba_hvd.serving.log_model import check_names, tags_of, write_facts
from gba_hvd.serving.manifest import ModelManifest, read_manifest
from gba_hvd.serving.stored_bytes import get_verified
from recovery.storage.local_store import LocalStore
from recovery.storage.open import open_store
from recovery.storage.store import Store


@dataclass(frozen=True)
class LoggedModel:
    """model_uri: `models:/ID`. version: of the registered model; empty where it was not registered

    step: of the rows; None: not known, of a model that an earlier version's `save_model` wrote
    alias_move: what was done to the alias, as "champion: version 1 -> 4"; empty without one
    """

    run_id: str
    model_uri: str
    version: str
    step: int | None
    alias_move: str = ""


def log_saved_model(
    url: str | Path,
    *,
    name: str,
    registered_model_name: str | None = None,
    alias: str | None = None,
    run: str | None = None,
    experiment: str | None = None,
    version: int | str = "newest",
    requirements: Sequence[str] = (),
    tracking_uri: str | None = None,
    on_bytes: Callable[[int], object] = lambda n: None,
    **storage_options: Any,
) -> LoggedModel:
    """Log a version of a saved model as `LogModel` logs that of a job, from any machine that reads the store.

    name, registered_model_name, alias, requirements: as of `LogModel`. run: id, job id or name of the run; None: a new
    run in `experiment`, whose default is that of `MLflowCallback`. on_bytes: called with how many more were copied:
    MLflow takes a folder, so all bytes of the version pass through a temporary one.
    Raises BadInput for a run, version or experiment id that is not there and for a model without an example;
    MlflowException.
    """
    check_names("model log", name, registered_model_name, alias)
    from gba_hvd.tracking import find_run, mlflow_model
    from gba_hvd.tracking.mlflow_run import ask, experiment_for, resolved_uri, run_of_its_own

    store = open_store(url, **storage_options)
    manifest = read_manifest(store, version)
    step, tags = _source_of(manifest)
    uri = resolved_uri(tracking_uri)
    ask(uri)  # before gigabytes are copied
    run_id = None if run is None else find_run.run_id_of(run, tracking_uri)
    experiment = experiment_for(uri, experiment) if run is None else ""
    with tempfile.TemporaryDirectory(prefix="gba-hvd-") as made:
        folder = Path(made)
        _copy(store, manifest, folder / "model", on_bytes)
        write_facts(
            folder, name=name, registered_model_name=registered_model_name, alias=alias, step=step, tags=tags,
            requirements=requirements,
        )  # fmt: skip
        with run_of_its_own(uri, experiment, name, run_id) as run_id:
            model_uri = mlflow_model.log_model(uri, run_id, folder)
            facts = mlflow_model.read_facts(folder)
            registered, moves = "", list[str]()
            if registered_model_name:
                registered = mlflow_model.register(uri, model_uri, facts, moves.append)
    return LoggedModel(run_id, model_uri, registered, step, *moves)


def _source_of(manifest: ModelManifest) -> tuple[int | None, dict[str, str]]:
    """The step of its rows, and the tags of a registered version: see `LogModel`."""
    source = manifest.source
    if "checkpoint" in source:
        step = int(source["step"])
        place = f"{str(source.get('checkpoint_url', '')).rstrip('/')}/{source['checkpoint']}"
        return step, tags_of(step, place, source.get("checkpoint_checksum", ""), step)
    tags = {name: str(value) for name, value in source.items() if name.startswith("gba_hvd.")}
    known = tags.get("gba_hvd.step", source.get("step"))
    return (None, tags) if known is None else (int(known), {"gba_hvd.step": str(known), **tags})


def _copy(store: Store, manifest: ModelManifest, folder: Path, on_bytes: Callable[[int], object]) -> None:
    """One version, each object verified; the manifest last."""
    to = LocalStore(folder)
    for one in {one.name: one for one in manifest.objects()}.values():
        to.put(one.name, [get_verified(store, one)])
        on_bytes(one.n_bytes)
    to.put(manifest.name, [store.get(manifest.name)])
