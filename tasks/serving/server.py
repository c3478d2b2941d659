"""Serves a trained model over HTTP on 127.0.0.1, with the protocol of MLflow's scoring server, and follows an alias.

The stage ``serve_model`` of `process/stages.py` runs it.
"""

import asyncio
import csv
import functools
import io
import json
import logging
import re
import socket
import threading
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import uvicorn
from PIL import Image
from uvicorn.protocols.http.h11_impl import H11Protocol

from tasks.config import CHAMPION
from tasks.data.encoding.answers import as_taken
from tasks.serving import raw_model
from tasks.serving.raw_model import Arrays, Meaning, RawModel, meaning
from tasks.system.access import Application, guarded
from tasks.system.errors import UserError

FORMATS = ("dataframe_split", "dataframe_records", "instances", "inputs")
MAX_BYTES = 8 * 2**20
"""The limit for a request: Python's JSON reader blocks all other threads."""
MAX_ROWS = 10_000
"""The limit for a request."""
UPLOAD_SECONDS = 30.0
"""The time for the head of a request, and the time for its body."""
SMALL = 64 * 2**10
MOST_AT_ONCE = 256
"""The maximum number of examples in one call of the model or in one part of an answer, so that a large request does not
block others."""
RETRY_SECONDS = 60.0
"""The time before a retry of a version that could not be loaded."""
WARM = (1, 2, 3)
"""The batch sizes that a new model computes before it answers: TensorFlow traces the first two sizes separately."""

log = logging.getLogger(__name__)


class BadRequest(Exception):
    """The content of a request does not fit the model."""


class RequestBatcher:
    """Computes simultaneous requests in one call of the model, in a single thread, so that calls do not compete for
    cores."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[RawModel, Arrays, Future[npt.NDArray[np.float32]]]] = deque()
        self._thread = ThreadPoolExecutor(1)

    def outputs(self, model: RawModel, features: Arrays) -> "Future[npt.NDArray[np.float32]]":
        """Return a future for a model's outputs."""
        future: Future[npt.NDArray[np.float32]] = Future()
        self._waiting.append((model, features, future))
        self._thread.submit(self._compute)
        return future

    def _compute(self) -> None:
        if not self._waiting:
            return  # An earlier call has computed it.
        model, together, count = self._waiting[0][0], [], 0
        # The alias may have moved between two requests.
        while self._waiting and self._waiting[0][0] is model and count < MOST_AT_ONCE:
            _, features, future = self._waiting.popleft()
            together.append((features, future))
            count += _count(features)
        self._answer(model, together)

    def _answer(self, model: RawModel, together: list[tuple[Arrays, "Future[npt.NDArray[np.float32]]"]]) -> None:
        try:
            joined = {name: np.concatenate([one[name] for one, _ in together]) for name in together[0][0]}
            outputs, first = model.outputs(joined), 0
            for features, future in together:
                future.set_result(outputs[first : first + _count(features)])
                first += _count(features)
        except Exception as error:
            if len(together) == 1:
                together[0][1].set_exception(error)
            else:  # A broken request must not break the others.
                for one in together:
                    self._answer(model, [one])


def _count(features: Arrays) -> int:
    return len(next(iter(features.values())))


class Served:
    """The current model, which follows its alias.

    Attributes:
        address: the given address of the model, by default that of the only champion.
        model: the current model, which may be replaced between two requests.
        trouble: why the alias cannot be followed, None if it can.
    """

    def __init__(self, address: str | None) -> None:
        self.model = raw_model.load(address)
        self.address = address or f"models:/{self.model.name.rpartition('/')[0]}@{CHAMPION}"
        self.trouble: str | None = None
        self._failed: tuple[str, str, float] | None = None
        warm(self.model)

    def follow(self, seconds: float) -> None:
        """Look up the alias again and again; the next version is loaded while the current one answers."""
        while True:
            time.sleep(seconds)
            self.look()

    def look(self) -> None:
        """Look up the alias, and serve its version; log each problem once, and its end."""
        trouble = self._find()
        if trouble is not None and trouble != self.trouble:
            log.warning("%s. Still serving %s", trouble, self.model.name)
        elif trouble is None and self.trouble is not None:
            log.warning("%s can be looked up again", self.address)
        self.trouble = trouble

    def _find(self) -> str | None:
        """Load the alias' version if it has changed; return why that fails, None if it does not."""
        try:
            from tasks.tracking.models import find_version

            version = find_version(self.address)
        except Exception as error:  # Registries raise many types; the next attempt may succeed.
            return f"{self.address} cannot be looked up ({error})"
        name = f"{version.name}/{version.version}"
        if name == self.model.name:
            self._failed = None
            return None
        if self._failed and name == self._failed[0] and time.monotonic() < self._failed[2]:
            return self._failed[1]
        began = time.monotonic()
        try:
            model = raw_model.load(f"models:/{name}")
            warm(model)
        except Exception as error:  # Whatever is wrong with the new version, the old one continues to answer.
            why = f"{name} is {self.address} now, but cannot be served ({type(error).__name__}: {error})"
            self._failed = (name, why, time.monotonic() + RETRY_SECONDS)
            return why
        before, self.model, self._failed = self.model.name, model, None
        log.warning("now serving %s instead of %s; loaded in %.1f s", name, before, time.monotonic() - began)
        return None


def warm(model: RawModel) -> None:
    """Run a model on zeros, so that no request waits for tracing."""
    for count in WARM:
        model.outputs({name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in model.takes.items()})


def schema(model: RawModel) -> dict[str, Any]:
    """Return a model's inputs and outputs, for /schema and for the answer to an invalid request."""
    takes = [{"name": name, "kind": kind} for name, kind in model.wanted.columns.items()]
    arrays = [{"name": name, "shape": [-1, *shape], "dtype": dtype} for name, (shape, dtype) in model.takes.items()]
    target = model.target
    gives = {
        "task": target.task,
        "num_outputs": target.num_outputs,
        "names": list(target.class_names or target.columns),
    }
    if list(model.wanted.columns.values()) == ["image"]:
        arrays[0]["or"] = "files of images as base64, (-1,)"
        return {"inputs": arrays, "outputs": gives}
    return {"columns": takes, "outputs": gives} if takes else {"inputs": arrays, "outputs": gives}


def read_request(model: RawModel, content_type: str, body: bytes) -> Arrays:
    """Return the features of a request, each (n, *shape).

    Raises:
        BadRequest: the content does not fit the model.
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "text/csv":
            lines = io.StringIO(body.decode("utf-8-sig"), newline="").readlines()
            delimiter = model.wanted.delimiter(lines, [*model.wanted.columns])
            rows = [row for row in csv.reader(lines, delimiter=delimiter, quoting=model.wanted.quoting) if row] or [[]]
            return _encoded(model, _split({"columns": rows[0], "data": rows[1:]}))
        given = json.loads(body)
    except (ValueError, RecursionError, csv.Error) as error:
        read_as = "CSV" if kind == "text/csv" else "JSON"
        advice = "Send JSON, or CSV with Content-Type: text/csv"
        raise BadRequest(f"the body cannot be read as {read_as} ({error}). {advice}") from None
    if not isinstance(given, dict) or len(formats := [name for name in FORMATS if name in given]) != 1:
        raise BadRequest(f"the body must be a JSON object with one of {', '.join(FORMATS)}")
    values = given[formats[0]]
    if formats[0] == "dataframe_split":
        values = _split(values)
    elif isinstance(values, list) and all(isinstance(row, dict) for row in values):
        values = _columns(values, model.wanted.columns or model.takes)
    elif formats[0] == "dataframe_records":
        raise BadRequest("dataframe_records must be a list of objects")
    return _encoded(model, values)


def _split(values: Any) -> dict[str, list[Any]]:
    names, rows = (values.get("columns"), values.get("data")) if isinstance(values, dict) else (None, None)
    if not (isinstance(names, list) and isinstance(rows, list)):
        raise BadRequest("dataframe_split must have the lists `columns` and `data`")
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(names):
            raise BadRequest(f"row {place} does not have {len(names)} values, one for each column")
    if twice := [name for name, count in Counter(map(str, names)).items() if count > 1]:
        raise BadRequest(f"the column '{twice[0]}' appears twice")
    return {str(name): [row[place] for row in rows] for place, name in enumerate(names)}


def _columns(rows: list[dict[str, Any]], wanted: Iterable[str]) -> dict[str, list[Any]]:
    """Return only the columns that the model takes: a thousand rows may name a million others."""
    return {name: [row.get(name) for row in rows] for name in wanted if not rows or any(name in row for row in rows)}


def _encoded(model: RawModel, values: Any) -> Arrays:
    """Return features from columns, from pixels or image files, or from arrays as prepared."""
    try:
        if (encoder := model.encoder) is None:
            arrays = values if isinstance(values, dict) else {next(iter(model.takes)): values}
            given = {name: _array(arrays[name], dtype) for name, (_, dtype) in model.takes.items() if name in arrays}
            return as_taken(model.takes, given, model.name)
        if isinstance(values, dict):
            lengths = {len(column) if isinstance(column, list) else -1 for column in values.values()}
            if -1 in lengths or len(lengths) > 1:
                raise BadRequest("the columns must be lists of the same length")
            for name in (name for name, kind in model.wanted.columns.items() if kind != "image"):
                for place, value in enumerate(values.get(name, ())):
                    if isinstance(value, list | dict):
                        raise BadRequest(f"column '{name}', row {place}: a list or an object is not a single value")
        elif not model.wanted.takes_files:
            raise BadRequest("the model takes columns by name")
        found = encoder.model_input(values)
    except (UserError, ValueError, TypeError) as error:
        raise BadRequest(str(error)) from None
    return found if isinstance(found, dict) else {next(iter(model.takes)): found}


def _array(values: Any, dtype: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    # JSON numbers become float64, and [1, 2] becomes int64.
    return array.astype(dtype) if dtype.startswith("float") and array.dtype.kind in "iuf" else array


def application(served: Served, batches: RequestBatcher) -> Application:
    """Return the ASGI application: /ping, /health, /version, /schema, /invocations."""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def ping(request: Request) -> Response:
        return Response("\n", media_type="application/json")

    async def version(request: Request) -> Response:
        return JSONResponse({"model": served.model.name, "trouble": served.trouble})

    async def takes(request: Request) -> Response:
        return JSONResponse(schema(served.model))

    async def invocations(request: Request) -> Response:
        model = served.model  # One model for the whole request, even if the alias moves.
        headers = {"x-model": quote(model.name)}
        try:
            told, body = _answers_as(model, request.query_params), bytearray()
            async with asyncio.timeout(UPLOAD_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > MAX_BYTES:
                        message = f"a request has at most {MAX_BYTES:,} bytes: send several with fewer rows each"
                        return JSONResponse({"message": message}, 413, headers)
            read = functools.partial(read_request, model, request.headers.get("content-type", ""), bytes(body))
            # Parsing a small request takes less time than passing it to a thread.
            features = read() if len(body) < SMALL else await asyncio.to_thread(read)
        except BadRequest as error:
            answer = {"error_code": "BAD_REQUEST", "message": str(error), "expected": schema(model)}
            return JSONResponse(answer, 400, headers)
        except TimeoutError:
            return JSONResponse({"message": f"the request was not complete after {UPLOAD_SECONDS:.0f} s"}, 408, headers)
        except ClientDisconnect:
            log.warning("a client disconnected after %d bytes of its request", len(body))
            return Response(status_code=400)
        if (count := _count(features)) > MAX_ROWS:
            message = f"a request has at most {MAX_ROWS:,} rows, and this one has {count:,}: send several"
            return JSONResponse({"message": message}, 413, headers)
        parts = []
        for at in range(0, max(1, count), MOST_AT_ONCE):
            rows = {name: one[at : at + MOST_AT_ONCE] for name, one in features.items()}
            outputs = await asyncio.wrap_future(batches.outputs(model, rows))
            written = functools.partial(_as_json, told, outputs)
            parts.append(written() if len(body) < SMALL else await asyncio.to_thread(written))
        predictions = f'{{"predictions": [{", ".join(parts)}]}}'
        return Response(predictions, media_type="application/json", headers=headers)

    return Starlette(
        routes=[
            Route("/ping", ping),
            Route("/health", ping),
            Route("/version", version),
            Route("/schema", takes),
            Route("/invocations", invocations, methods=["POST"]),
        ]
    )


def _as_json(told: Meaning | None, outputs: npt.NDArray[np.float32]) -> str:
    """Return the answers for examples as JSON, without the brackets around them; null for NaN and infinity, which JSON
    cannot represent."""
    finite = np.asarray(np.isfinite(outputs).all(axis=1)).tolist()
    if told is None:
        rows: list[Any] = outputs.tolist()
    else:
        columns = told(np.nan_to_num(outputs))
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return json.dumps([row if is_finite else None for row, is_finite in zip(rows, finite, strict=True)])[1:-1]


def _answers_as(model: RawModel, wanted: Mapping[str, str]) -> Meaning | None:
    """Return how to answer a request: as the most probable classes, or, with None, as plain numbers."""
    if other := wanted.keys() - {"top_k", "probabilities"}:
        raise BadRequest(f"{min(other)[:20]}: no such parameter. Allowed: top_k, probabilities")
    if not wanted:
        return None
    top_k = wanted.get("top_k", "1")
    if re.fullmatch(r"[1-9][0-9]{0,5}", top_k) is None:
        raise BadRequest(f"top_k = '{top_k[:20]}': set the number of classes in the answer, 1 or more")
    return meaning(model.target, int(top_k), "probabilities" in wanted)


class Connection(H11Protocol):
    """A connection, which ends if its client does not complete the head of a request in ``UPLOAD_SECONDS``. uvicorn
    itself waits forever for the first request, and for the rest of a head."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        if self.deadline is not None:
            self.deadline.cancel()

    def _wait(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        self.deadline = self.loop.call_later(UPLOAD_SECONDS, self._end)

    def _end(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def make_server(asked: Application) -> uvicorn.Server:
    """Return the HTTP server of an application."""
    return uvicorn.Server(
        uvicorn.Config(
            asked, http=Connection, access_log=False, log_level="warning", lifespan="off", timeout_graceful_shutdown=30
        )
    )


def serve(
    model: str | None, port: int, poll_seconds: float, key: str, tell: Callable[[dict[str, Any]], object]
) -> None:
    """Serve until this process is asked to end, and answer the requests received before.

    Args:
        model: see ``raw_model.load``.
        port: the port on 127.0.0.1; 0 is any free port.
        poll_seconds: the interval between two look-ups of the alias.
        key: ``user:password`` that clients must send.
        tell: called with the model's name and the port when the server answers.

    Raises:
        UserError: the model does not exist, or the port is in use.
    """
    warnings.simplefilter("error", Image.DecompressionBombWarning)
    served = Served(model)
    # `create_server` makes sockets without a protocol, for which asyncio delays small answers by 40 ms (Nagle's
    # algorithm waits for the client's acknowledgement).
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise UserError(f"--port {port}: {error.strerror}. Choose another one, or 0 for any") from None
    port = listening.getsockname()[1]
    asked = guarded(application(served, RequestBatcher()), key)
    if served.address.startswith("models:") and "@" in served.address:
        threading.Thread(target=served.follow, args=(poll_seconds,), daemon=True).start()
    server = make_server(asked)
    tell({"model": served.model.name, "port": port})
    with listening:
        server.run([listening])
