"""A saved model over HTTP: `gba-hvd model serve`. Requests and answers are those of `mlflow models serve`.

MLflow's scoring server reads the requests; what it needs of a model is here. Answers to what the model refuses have
status 400 and name the field; where rows cannot be read, status 503.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any, cast

import pandas
import uvicorn
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from mlflow.pyfunc import scoring_server

from gba_hvd.errors import BadInput
from gba_hvd.serving.hashed_columns import check_hashed, id_columns, of_hashed_tables, with_hashes
from gba_hvd.serving.load import OpenModel
from recovery.errors import Damaged, StoreError

_BACKLOG = 128


class _Scorer:
    """What the scoring server needs of a pyfunc model. Without a signature it leaves columns as they came.

    hashed: columns of strings that are ids of hashed tables. encoded: requests have ids although the model has an
    encoder
    """

    def __init__(self, model: OpenModel, hashed: Sequence[str], encoded: bool) -> None:
        self._model, self._hashed, self._ids, self.metadata = model, hashed, id_columns(model), Model()
        self._encoded, self._is_raw = encoded, model.encoder is not None and not encoded

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> pandas.DataFrame:
        try:
            if not isinstance(data, pandas.DataFrame):
                raise BadInput(
                    f"expected columns by name, as in {{'dataframe_split': ...}} or {{'dataframe_records': ...}}, got "
                    f"{type(data).__name__}"
                )
            columns = data if self._is_raw else with_hashes(data, self._hashed, self._ids)
            with of_hashed_tables(self._hashed):
                return pandas.DataFrame(self._model.predict(columns, encoded=self._encoded))
        except BadInput as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        except (Damaged, StoreError) as error:
            raise MlflowException(str(error), error_code=TEMPORARILY_UNAVAILABLE) from error


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens. port: 0: a free one. Raises BadInput where the address cannot be had."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, number)
    except OSError as error:
        raise BadInput(f"--host {host}: {error}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise BadInput(f"{host}:{port} cannot be listened on: {error.strerror}; give another --port") from error
    return listening


def app_of(model: OpenModel, hashed: Sequence[str] = (), encoded: bool = False) -> Any:
    """The ASGI application that answers requests. hashed: columns of strings, hashed to ids of hashed tables. encoded:
    requests have ids and numbers also where the model has an encoder.

    Raises BadInput for a model that takes no columns, and for a hashed column that is no field of ids.
    """
    if model.manifest.input is None:
        raise BadInput(
            "this model was saved without input_example, so how a request becomes its input is not known: save it "
            "with one (`gba-hvd model export --example`)"
        )
    check_hashed(model, hashed, encoded)
    return scoring_server.init(cast(Any, _Scorer(model, hashed, encoded)))


def healthy_unless(app: Any, problem: Callable[[], str]) -> Any:
    """The application, whose /health and /ping have status 503 while there is a problem, in words."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in ("/health", "/ping") and (text := problem()):
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": text.encode()})
            return
        await app(scope, receive, send)

    return answer


def serve(app: Any, listening: socket.socket) -> None:
    """Answer requests until SIGTERM or SIGINT, and those that have begun."""
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
