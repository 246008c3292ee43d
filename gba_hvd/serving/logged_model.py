"""The saved model inside a model that MLflow has, in a local folder: by its address in the registry, or in a run."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gba_hvd.errors import BadInput
from gba_hvd.extras import extra
from recovery.redaction import redacted


def is_address(url: str | Path) -> bool:
    return str(url).startswith(("models:/", "runs:/"))


def is_alias(url: str | Path) -> bool:
    return str(url).startswith("models:/") and "@" in str(url)


def version_of_alias(address: str, tracking_uri: str | None = None) -> str:
    """`models:/NAME/VERSION` of `models:/NAME@ALIAS`. Raises BadInput; MissingPackage; MlflowException."""
    with extra("mlflow", "mlflow", f"{address} needs"):
        from mlflow import MlflowClient
    from gba_hvd.tracking.mlflow_run import ask, resolved_uri

    uri = resolved_uri(tracking_uri)
    if not ask(uri):
        raise BadInput(f"{address} is not there: {redacted(uri)} has no runs and no models")
    name, _, alias = address.removeprefix("models:/").rpartition("@")
    return f"models:/{name}/{MlflowClient(tracking_uri=uri).get_model_version_by_alias(name, alias).version}"


@contextlib.contextmanager
def downloaded(address: str, tracking_uri: str | None = None) -> Iterator[Path]:
    """The folder of the saved model, as `log_saved_model` and `LogModel` log it; it is gone after the context.

    Raises BadInput for a model that neither has logged, or where there is none; MissingPackage; MlflowException.
    """
    with extra("mlflow", "mlflow", f"{address} needs"):
        import mlflow
    from gba_hvd.tracking.mlflow_run import ask, resolved_uri

    uri = resolved_uri(tracking_uri)
    if not ask(uri):
        raise BadInput(f"{address} is not there: {redacted(uri)} has no runs and no models")
    mlflow.set_tracking_uri(uri)  # where MLflow looks for versions and aliases, which it takes no argument for
    with tempfile.TemporaryDirectory(prefix="gba-hvd-") as made:
        folder = Path(mlflow.artifacts.download_artifacts(artifact_uri=address, dst_path=made, tracking_uri=uri))
        if not (folder / "artifacts" / "model").is_dir():
            raise BadInput(f"{address} was logged by other means than LogModel and `gba-hvd model log`: open it by "
                           "mlflow.pyfunc.load_model")  # fmt: skip
        yield folder / "artifacts" / "model"
