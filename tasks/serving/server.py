"""A trained model behind HTTP on 127.0.0.1, by the protocol of MLflow's scoring server; it follows an alias.

`python -m tasks serve_model REQUEST` runs it, for whoever has the key that the environment holds, STRATAGEM_KEY.
"""

import csv
import functools
import io
import json
import logging
import os
import re
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import IO, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
from PIL import Image

from tasks.data.encoding.rows import as_taken
from tasks.records import Serving, ServingRequest
from tasks.serving import raw_model
from tasks.serving.raw_model import Arrays, Meaning, RawModel, meaning
from tasks.system.access import Application, guarded
from tasks.system.errors import UserError
from tasks.tracking import trained_models

FORMATS = ("dataframe_split", "dataframe_records", "instances", "inputs")
MAX_BYTES = 64 * 2**20
"""Of a request."""
SMALL = 64 * 2**10
MOST_AT_ONCE = 256
"""Examples of waiting requests that are computed together."""
RETRY_SECONDS = 60.0
"""After so long a version that could not be loaded is tried again."""
WARM = (1, 2, 3)
"""How many examples a new model computes before it answers: TensorFlow traces the first two sizes by themselves."""

log = logging.getLogger(__name__)


class BadRequest(Exception):
    """What a request has is not what the model takes."""


class RequestBatcher:
    """Computes what several requests ask at once by one call of the model; one thread does, so that cores are not
    shared by calls that wait for each other."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[RawModel, Arrays, Future[npt.NDArray[np.float32]]]] = SimpleQueue()
        threading.Thread(target=self._compute, daemon=True).start()

    def outputs(self, model: RawModel, features: Arrays) -> "Future[npt.NDArray[np.float32]]":
        """Return what a model will have given for some examples."""
        future: Future[npt.NDArray[np.float32]] = Future()
        self._waiting.put((model, features, future))
        return future

    def _compute(self) -> None:
        kept = None
        while True:
            model, features, future = kept or self._waiting.get()
            kept, together, count = None, [(features, future)], _count(features)
            while count < MOST_AT_ONCE:
                try:
                    other, more, waiting = self._waiting.get_nowait()
                except Empty:
                    break
                if other is not model:  # The alias has moved between them.
                    kept = (other, more, waiting)
                    break
                together.append((more, waiting))
                count += _count(more)
            self._answer(model, together)

    def _answer(self, model: RawModel, together: list[tuple[Arrays, "Future[npt.NDArray[np.float32]]"]]) -> None:
        try:
            joined = {name: np.concatenate([one[name] for one, _ in together]) for name in together[0][0]}
            starts = range(0, max(1, _count(joined)), MOST_AT_ONCE)  # One request may be larger than all memory.
            parts = [{name: one[at : at + MOST_AT_ONCE] for name, one in joined.items()} for at in starts]
            outputs, first = np.concatenate([model.outputs(part) for part in parts]), 0
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
    """The model that answers now, and what follows its alias.

    Attributes:
        model: is replaced between two requests.
        trouble: why the alias cannot be followed, None where it can.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self.model = raw_model.load(address)
        self.trouble: str | None = None
        self._failed: tuple[str, str, float] | None = None
        warm(self.model)

    def follow(self, seconds: float, ended: threading.Event) -> None:
        """Look where the alias is, until the event is set; the next version is loaded while this one answers."""
        while not ended.wait(seconds):
            self.look()

    def look(self) -> None:
        """Look where the alias is, and serve that version; tell of trouble once, and of its end."""
        trouble = self._find()
        if trouble is not None and trouble != self.trouble:
            log.warning("%s. %s is served on", trouble, self.model.name)
        elif trouble is None and self.trouble is not None:
            log.warning("%s can be looked up again", self._address)
        self.trouble = trouble

    def _find(self) -> str | None:
        """Load the version that the alias is at, if it is another one; return why that cannot be."""
        try:
            version = trained_models.find_version(self._address)
            if version is None:
                from tasks.tracking.models import find_version

                version = find_version(self._address)
        except Exception as error:  # Whatever a registry raises, the next look may find it well.
            return f"{self._address} cannot be looked up ({error})"
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
        except Exception as error:  # Whatever is wrong with the new one, the old one answers.
            why = f"{name} is {self._address} now, and cannot be served ({type(error).__name__}: {error})"
            self._failed = (name, why, time.monotonic() + RETRY_SECONDS)
            return why
        before, self.model, self._failed = self.model.name, model, None
        log.warning("%s is served now, in place of %s; loaded in %.1f s", name, before, time.monotonic() - began)
        return None


def warm(model: RawModel) -> None:
    """Let a model compute nothing of meaning, so that no request waits for what is done once."""
    for count in WARM:
        model.outputs({name: np.zeros((count, *shape), dtype) for name, (shape, dtype) in model.takes.items()})


def schema(model: RawModel) -> dict[str, Any]:
    """Return what a model takes and gives, as the answer to a bad request has it."""
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
    """Return the features that a request has, (n, *shape) each.

    Raises:
        BadRequest: what it has is not what the model takes.
    """
    kind = content_type.partition(";")[0].strip().lower()
    try:
        if kind == "text/csv":
            rows = [row for row in csv.reader(io.StringIO(body.decode("utf-8-sig"), newline="")) if row] or [[]]
            return _encoded(model, _split({"columns": rows[0], "data": rows[1:]}))
        given = json.loads(body)
    except (ValueError, RecursionError, csv.Error) as error:
        raise BadRequest(f"the body cannot be read as {kind or 'application/json'} ({error})") from None
    if not isinstance(given, dict) or len(formats := [name for name in FORMATS if name in given]) != 1:
        raise BadRequest(f"the body is to be a JSON object with one of {', '.join(FORMATS)}")
    values = given[formats[0]]
    if formats[0] == "dataframe_split":
        values = _split(values)
    elif isinstance(values, list) and values and all(isinstance(row, dict) for row in values):
        values = _columns(values, model.wanted.columns or model.takes)
    elif formats[0] == "dataframe_records" and values != []:
        raise BadRequest("dataframe_records is to be a list of objects")
    return _encoded(model, values)


def _split(values: Any) -> dict[str, list[Any]]:
    names, rows = (values.get("columns"), values.get("data")) if isinstance(values, dict) else (None, None)
    if not (isinstance(names, list) and isinstance(rows, list)):
        raise BadRequest("dataframe_split is to have the lists `columns` and `data`")
    for place, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != len(names):
            raise BadRequest(f"row {place} has not {len(names)} values, as there are columns")
    return {str(name): [row[place] for row in rows] for place, name in enumerate(names)}


def _columns(rows: list[dict[str, Any]], wanted: Iterable[str]) -> dict[str, list[Any]]:
    """Return the columns that a model takes: each row may name others, and a thousand rows a million."""
    return {name: [row.get(name) for row in rows] for name in wanted if any(name in row for row in rows)}


def _encoded(model: RawModel, values: Any) -> Arrays:
    """Return the features of columns, of pixels or files of images, or of arrays as prepared."""
    try:
        if not model.features:
            arrays = values if isinstance(values, dict) else {next(iter(model.takes)): values}
            given = {name: _array(arrays[name], dtype) for name, (_, dtype) in model.takes.items() if name in arrays}
            return as_taken(model.takes, given, model.name)
        if isinstance(values, dict):
            lengths = {len(column) if isinstance(column, list) else -1 for column in values.values()}
            if -1 in lengths or len(lengths) > 1:
                raise BadRequest("the columns are to be lists of one length")
            if absent := [name for name in model.wanted.columns if name not in values]:
                raise BadRequest(f"these columns are missing: {', '.join(map(repr, absent))}")
        elif not model.wanted.takes_files:
            raise BadRequest("the model takes columns by name")
        encoder = model.input_encoder
        if isinstance(values, list) and values and all(isinstance(one, str) for one in values):
            # As columns: an array of texts gives each of them the longest one's room.
            return {name: np.asarray(one) for name, one in encoder.encode({encoder.columns[0]: values}).items()}
        found = encoder.model_input(values)
    except (UserError, ValueError, TypeError) as error:
        raise BadRequest(str(error)) from None
    return found if isinstance(found, dict) else {next(iter(model.takes)): found}


def _array(values: Any, dtype: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    # JSON's numbers are float64, and [1, 2] is whole.
    return array.astype(dtype) if dtype.startswith("float") and array.dtype.kind in "iuf" else array


def application(served: Served, batches: RequestBatcher) -> Application:
    """Return the ASGI application: /ping, /health, /version, /schema, /invocations."""
    import asyncio

    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def ping(request: Request) -> Response:
        return Response("\n", media_type="application/json")

    async def version(request: Request) -> Response:
        return JSONResponse({"model": served.model.name, "trouble": served.trouble})

    async def takes(request: Request) -> Response:
        return JSONResponse(schema(served.model))

    async def invocations(request: Request) -> Response:
        model = served.model  # One for the whole request, whatever is swapped meanwhile.
        headers = {"x-model": quote(model.name)}
        try:
            told, body = _answers_as(model, request.query_params), bytearray()
            async for part in request.stream():
                body += part
                if len(body) > MAX_BYTES:
                    return JSONResponse({"message": f"a request has at most {MAX_BYTES:,} bytes"}, 413, headers)
            read = functools.partial(read_request, model, request.headers.get("content-type", ""), bytes(body))
            # Of a small one it takes less time than to hand it to a thread.
            features = read() if len(body) < SMALL else await asyncio.to_thread(read)
        except BadRequest as error:
            answer = {"error_code": "BAD_REQUEST", "message": str(error), "expected": schema(model)}
            return JSONResponse(answer, 400, headers)
        outputs = await asyncio.wrap_future(batches.outputs(model, features))
        answer = {"predictions": _predictions(told, outputs)}
        return Response(json.dumps(answer), media_type="application/json", headers=headers)

    return Starlette(
        routes=[
            Route("/ping", ping),
            Route("/health", ping),
            Route("/version", version),
            Route("/schema", takes),
            Route("/invocations", invocations, methods=["POST"]),
        ]
    )


def _predictions(told: Meaning | None, outputs: npt.NDArray[np.float32]) -> list[Any]:
    """Return the answer for each example; None where the model gives NaN or infinity, which JSON does not have."""
    finite = np.asarray(np.isfinite(outputs).all(axis=1)).tolist()
    if told is None:
        rows: list[Any] = outputs.tolist()
    else:
        columns = told(np.nan_to_num(outputs))
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [row if is_finite else None for row, is_finite in zip(rows, finite, strict=True)]


def _answers_as(model: RawModel, wanted: Mapping[str, str]) -> Meaning | None:
    """Return how a request wants its outputs: as the most probable classes, or, with None, as plain numbers."""
    top_k = wanted.get("top_k")
    if top_k is None:
        return None
    if re.fullmatch(r"[1-9][0-9]{0,5}", top_k) is None:
        raise BadRequest(f"top_k = '{top_k[:20]}': give how many classes the answer names, 1 or more")
    return meaning(model.target, int(top_k), "probabilities" in wanted)


def serve(request: ServingRequest, answers: IO[str]) -> None:
    """Serve until this process is to end; requests that came before are answered.

    Args:
        request: what is served.
        answers: gets a line of JSON when the server answers.

    Raises:
        UserError: no such model, or the port is taken.
    """
    import socket

    import uvicorn

    warnings.simplefilter("error", Image.DecompressionBombWarning)
    served, ended = Served(request.model), threading.Event()
    # Not `create_server`, whose sockets have no protocol: asyncio then lets small answers wait 40 ms for the client's
    # acknowledgement (Nagle's algorithm).
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", request.port))
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise UserError(f"--port {request.port}: {error.strerror}. Give another one, or 0 for any") from None
    port = listening.getsockname()[1]
    asked = guarded(application(served, RequestBatcher()), os.environ["STRATAGEM_KEY"])
    config = uvicorn.Config(asked, access_log=False, log_level="warning", lifespan="off", timeout_graceful_shutdown=30)
    if "@" in request.model:
        threading.Thread(target=served.follow, args=(request.poll_seconds, ended), daemon=True).start()
    server = uvicorn.Server(config)
    print(Serving(port=port, model=served.model.name).model_dump_json(), file=answers, flush=True)
    with listening:
        server.run([listening])
    ended.set()
