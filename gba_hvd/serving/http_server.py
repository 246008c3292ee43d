"""A saved model over HTTP: `gba-hvd model serve`. Requests and answers are those of `mlflow models serve`.

MLflow's scoring server reads the requests; what it needs of a model is here. Answers to what the model refuses have
status 400 and name the field; where rows cannot be read, status 503; bodies that are too large, status 413.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, cast

import pandas
import uvicorn
from mlflow.exceptions import MlflowException
from mlflow.models import Model
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from mlflow.pyfunc import scoring_server
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse

from gba_hvd.errors import BadInput
from gba_hvd.serving.hashed_columns import check_hashed, id_columns, of_hashed_tables, with_hashes
from gba_hvd.serving.load import OpenModel
from gba_hvd.serving.sample_files import raw_csv
from recovery.errors import Damaged, StoreError

if TYPE_CHECKING:
    from gba_hvd.data.row_encoder import RowEncoder

_BACKLOG = 128
_MOST_WAIT_S = 30  # for requests that have begun, after SIGTERM
_MOST_BYTES = 64 << 20  # of the body of a request
_BODY: ContextVar[list[bytes]] = ContextVar("_BODY")  # of the request that is answered, in pieces


class _Scorer:
    """What the scoring server needs of a pyfunc model. Without a signature it leaves columns as they came.

    hashed: columns of strings that are ids of hashed tables. encoded: requests have ids although the model would make
    them. reading: held for one request, so that an update does not come between its parts
    """

    def __init__(
        self, model: OpenModel, hashed: Sequence[str], encoded: bool,
        reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        self._model, self._hashed, self._ids, self.metadata = model, hashed, id_columns(model.manifest.input), Model()
        self._encoded, self._reading = encoded, reading
        self._is_raw = not encoded and model.manifest.takes_raw
        if self._is_raw:
            _ = model.encoder  # read now, not by the first request

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> pandas.DataFrame:
        try:
            if not isinstance(data, pandas.DataFrame):
                raise BadInput(
                    f"expected columns by name, as in {{'dataframe_split': ...}} or {{'dataframe_records': ...}}, got "
                    f"{type(data).__name__}"
                )
            data = _with_whole_numbers(data)
            columns = data if self._is_raw else with_hashes(data, self._hashed, self._ids, "start the server with")
            with of_hashed_tables(self._hashed), self._reading():
                return pandas.DataFrame(self._model.predict(columns, encoded=self._encoded))
        except BadInput as error:
            raise MlflowException.invalid_parameter_value(str(error)) from error
        except (Damaged, StoreError) as error:
            raise MlflowException(str(error), error_code=TEMPORARILY_UNAVAILABLE) from error


def _with_whole_numbers(data: pandas.DataFrame) -> pandas.DataFrame:
    """The frame with whole numbers and nulls as they were sent: where some are null, pandas makes floats of the others,
    which changes large ids."""
    pieces = _BODY.get([])
    lost = [name for name in data if data.columns.is_unique and data[name].dtype == float and data[name].isna().any()]
    if not (pieces and lost):
        return data
    sent = _frame_sent(b"".join(pieces))
    columns = {name: [None if pandas.isna(one) else one for one in sent[name]] for name in lost}
    whole = {name: some for name, some in columns.items() if all(one is None or isinstance(one, int) for one in some)}
    return data.assign(**{name: pandas.Series(some, data.index, dtype=object) for name, some in whole.items()})


def _frame_sent(body: bytes) -> pandas.DataFrame:
    """What JSON or Parquet, which MLflow has read, holds."""
    if body.startswith(b"PAR1"):
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(body)).to_pandas(integer_object_nulls=True)
    sent = json.loads(body, parse_constant=str)  # NaN is no null
    split = sent.get("dataframe_split") or {"data": sent["dataframe_records"]}
    return pandas.DataFrame(split["data"], split.get("index"), split.get("columns"), dtype=object)


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


def app_of(
    model: OpenModel,
    hashed: Sequence[str] = (),
    encoded: bool = False,
    reading: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> Any:
    """The ASGI application that answers requests. hashed: columns of strings, hashed to ids of hashed tables. encoded:
    requests have ids and numbers also where the model has an encoder, or hashed columns. reading: of the model's
    `Follower`.

    Raises BadInput for a model that takes no columns, and for a hashed column that is no field of ids.
    """
    if model.manifest.input is None:
        raise BadInput(
            "this model was saved without input_example, so how a request becomes its input is not known: save it "
            "with one (`gba-hvd model export --example`)"
        )
    check_hashed(model.manifest, hashed, encoded)
    app: Any = scoring_server.init(cast(Any, _Scorer(model, hashed, encoded, reading)))
    app.add_exception_handler(RecursionError, _too_deep)
    kept = _with_body_kept(app)
    return kept if encoded or model.encoder is None else _with_csv_as_written(kept, model.encoder)


def _with_body_kept(app: Any) -> Any:
    """The application, which keeps the body of a request in `_BODY`: not CSV, which does not say what is a number."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or _is_csv(scope):
            await app(scope, receive, send)
            return
        pieces: list[bytes] = []
        _BODY.set(pieces)

        async def receive_and_keep() -> Any:
            message = await receive()
            pieces.append(message.get("body", b""))
            return message

        await app(scope, receive_and_keep, send)

    return answer


async def _too_deep(request: Any, error: Exception) -> PlainTextResponse:
    return PlainTextResponse(f"the JSON of the request is nested too deep to be read: {error}", 400)


def _with_csv_as_written(app: Any, encoder: RowEncoder) -> Any:
    """The application, to which `text/csv` comes as JSON: MLflow makes numbers of "007", and null of "NA"."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or not _is_csv(scope):
            await app(scope, receive, send)
            return
        data, is_whole = b"", False
        while not is_whole:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            data, is_whole = data + message.get("body", b""), not message.get("more_body", False)
        try:
            body = json.dumps({"dataframe_split": raw_csv(data, encoder)}).encode()
        except BadInput as error:
            await _respond(send, 400, str(error))
            return
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive_json() -> Any:
            return next(messages, None) or await receive()

        others = [one for one in scope["headers"] if one[0] not in (b"content-type", b"content-length")]
        headers = [*others, (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await app({**scope, "headers": headers}, receive_json, send)

    return answer


def _is_csv(scope: Any) -> bool:
    """Whether a request is CSV in UTF-8; MLflow refuses other encodings."""
    kind, *rest = dict(scope["headers"]).get(b"content-type", b"").decode("latin-1").lower().split(";")
    return kind.strip() == "text/csv" and [one.strip() for one in rest] in ([], ["charset=utf-8"])


def healthy_unless(app: Any, has_ended: Callable[[], bool], problem: Callable[[], str]) -> Any:
    """The application, whose /health and /ping show a problem of updates, in words: with status 503 once these have
    ended, else 200."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] in ("/health", "/ping") and (text := problem()):
            await _respond(send, 503 if has_ended() else 200, text)
            return
        await app(scope, receive, send)

    return answer


async def _respond(send: Any, status: int, text: str, *headers: tuple[bytes, bytes]) -> None:
    headers = ((b"content-type", b"text/plain; charset=utf-8"), *headers)
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    await send({"type": "http.response.body", "body": text.encode()})


def serve(app: Any, listening: socket.socket) -> None:
    """Answer requests until SIGTERM or SIGINT, then those that have begun, for at most 30 s."""
    config = uvicorn.Config(_with_type(app), log_level="warning", timeout_graceful_shutdown=_MOST_WAIT_S)
    _Server(config).run(sockets=[listening])


class _Server(uvicorn.Server):
    """Reports after SIGTERM that it waits for requests."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if n := sum(map(_is_answering, self.server_state.connections)):
            print(
                f"requests that have begun are waited for ({n}), for {_MOST_WAIT_S} s at most; Ctrl-C ends it now",
                file=sys.stderr, flush=True,
            )  # fmt: skip
        await super().shutdown(sockets)


def _is_answering(connection: Any) -> bool:
    cycle = getattr(connection, "cycle", None)
    return cycle is not None and not cycle.response_complete


def _with_type(app: Any) -> Any:
    """The application, for requests whose Content-Type MLflow would not read, large bodies, and clients that leave."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] != "/invocations" or scope["method"] != "POST":
            await app(scope, receive, send)
            return
        kind = dict(scope["headers"]).get(b"content-type")
        if kind is None:
            await _respond(send, 415, "the request has no Content-Type: expected application/json, text/csv or "
                           "application/x-parquet")  # fmt: skip
            return
        headers = [(name, value.lower() if name == b"content-type" else value) for name, value in scope["headers"]]
        body = _LimitedBody(receive, send, int(dict(headers).get(b"content-length", b"0")))
        with contextlib.suppress(ClientDisconnect, asyncio.CancelledError):
            await app({**scope, "headers": headers}, body.receive, body.send)

    return answer


class _LimitedBody:
    """A request's channels. A body over the limit is answered here; to the application the client has left then.

    n_bytes: as announced; what comes counts, too
    """

    def __init__(self, receive: Any, send: Any, n_bytes: int) -> None:
        self._receive, self._send, self._announced, self._came = receive, send, n_bytes, 0
        self._refused = False

    async def receive(self) -> Any:
        if self._announced <= _MOST_BYTES:
            message = await self._receive()
            self._came += len(message.get("body", b""))
            if self._came <= _MOST_BYTES:
                return message
        if not self._refused:
            self._refused = True
            got = f"{self._announced:,}" if self._announced else "more"
            text = f"the body of a request may have {_MOST_BYTES:,} bytes, got {got}"
            await _respond(self._send, 413, f"{text}: send fewer samples at a time", (b"connection", b"close"))
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if not self._refused:
            await self._send(message)
