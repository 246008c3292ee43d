"""A model that a worker has written, as a logged and a registered model of MLflow. All calls may raise.

The worker's folder (`NAME.model` beside the spool) has `model`, what is logged as the artifact of this name;
`pyfunc_model.py`, the code; and `log.json`: name, registered_model_name, alias, step, tags, columns and outputs of an
example, requirements, raw (whether columns hold raw values).
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlflow
from mlflow import MlflowClient


def read_facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "log.json").read_text())
    return found


def log_model(uri: str, run_id: str, folder: Path) -> str:
    """Log the model of a folder with a run; returns its URI, `models:/ID`."""
    facts = read_facts(folder)
    mlflow.set_tracking_uri(uri)
    # MLflow puts a logged model into the experiment that is set, not into that of the run.
    mlflow.set_experiment(experiment_id=MlflowClient(tracking_uri=uri).get_run(run_id).info.experiment_id)
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of MLflow's own imports; of whole numbers, which `predict` checks itself
        import pandas
        from mlflow import pyfunc  # slow, and senders without a model have no use for it
        from mlflow.models import Model, infer_signature

        example, outputs = pandas.DataFrame(facts["columns"]), pandas.DataFrame(facts["outputs"])
        signature = infer_signature(example, outputs.astype("float32"))
        signature.inputs = _uncast(signature.inputs, facts.get("raw", False))
        info = Model.log(
            artifact_path=None,
            flavor=pyfunc,
            name=facts["name"],
            run_id=run_id,
            python_model=str(folder / "pyfunc_model.py"),
            artifacts={"model": str(folder / "model")},
            signature=signature,
            input_example=example,
            pip_requirements=facts["requirements"],
            step=facts["step"],
            tags=facts["tags"],
        )
    return str(info.model_uri)


def _uncast(schema: Any, is_raw: bool) -> Any:
    """Columns of whole numbers and booleans as `Any`, so that the model gets what came and refuses it by its name.

    is_raw: all are; a text such as "7" is an id there, and a price may be missing.
    `mlflow models serve` casts a request to the types of the signature: 0.5 to the id 0, "false" to true.
    """
    from mlflow.types.schema import AnyType, ColSpec, DataType, Schema

    exact = (DataType.long, DataType.integer, DataType.boolean)
    as_it_is = AnyType()  # type: ignore[no-untyped-call]
    return Schema(
        [ColSpec(as_it_is, one.name, one.required) if is_raw or one.type in exact else one for one in schema.inputs]
    )


def register(
    uri: str, model_uri: str, facts: Mapping[str, Any], on_alias: Callable[[str], object] = lambda move: None
) -> str:
    """Register a logged model, unless an attempt before has; returns the version.

    on_alias: called with what was done to the alias, as "champion: version 1 -> 4".
    """
    mlflow.set_tracking_uri(uri)
    client, name, alias = MlflowClient(tracking_uri=uri), facts["registered_model_name"], facts["alias"]
    there = [one for one in client.search_model_versions(f'name="{name}"') if one.source == model_uri]
    version = (there[0] if there else mlflow.register_model(model_uri, name, tags=facts["tags"])).version
    if alias:
        before = client.get_registered_model(name).aliases.get(alias)
        client.set_registered_model_alias(name, alias, version)
        on_alias(f"{alias}: version {version}" if before is None else f"{alias}: version {before} -> {version}")
    return str(version)
