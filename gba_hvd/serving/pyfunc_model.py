"""The code of a logged model: MLflow copies this file with it and runs it where the model is opened."""

from __future__ import annotations

from typing import Any

import mlflow
import pandas
from mlflow.exceptions import MlflowException
from mlflow.pyfunc.model import PythonModel, PythonModelContext


class SavedModel(PythonModel):
    """Scores of a data frame, by the model in the artifact `model`."""

    def load_context(self, context: PythonModelContext) -> None:
        from gba_hvd.serving.load import open_model

        self._model = open_model(context.artifacts["model"])
        self._encoder = self._model.encoder  # read now, not by the first request

    def predict(
        self, context: PythonModelContext, model_input: pandas.DataFrame, params: dict[str, Any] | None = None
    ) -> pandas.DataFrame:
        from gba_hvd.errors import BadInput

        try:
            if self._encoder is not None:
                self._encoder.refuse_nan_of_text(model_input)
            return pandas.DataFrame(self._model.predict(model_input))
        except BadInput as error:  # what a server answers with status 400; any other error has no text there
            raise MlflowException.invalid_parameter_value(str(error)) from error


if not __name__.startswith("gba_hvd."):  # (run by MLflow, as a copy)
    mlflow.models.set_model(SavedModel())
