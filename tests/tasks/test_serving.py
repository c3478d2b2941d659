"""A served model: what requests may have, what is computed together, and which version answers while an alias moves."""

import asyncio
import base64
import contextlib
import http.client
import io
import json
import socket
import tempfile
import threading
import time
from pathlib import Path

import keras
import numpy as np
import pytest
from PIL import Image

from tasks import records
from tasks.data.encoding.inputs import Wanted
from tasks.serving import outputs, server
from tasks.serving.raw_model import RawModel
from tasks.serving.server import BadRequest, RequestBatcher, Served, application, read_request, schema
from tasks.system.errors import UserError
from tasks.tracking.store import open_store
from tasks.tracking.trained_models import TrainedModel
from tests.tasks.foreign_models import write_huge_model, write_model_of_unknown_class
from tests.tasks.registering import Trained

ENCODING = {
    "features": {
        "number": {
            "kind": "number", "shape": (2,), "dtype": "float32",
            "columns": [
                {"name": name, "kind": "number", "width": 1, "fill": fill} for name, fill in (("a", 5.0), ("b", None))
            ],
        }
    },
    "vocabularies": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A model of rows: the sum of the columns a and b."""
    inputs = keras.Input((2,), name="number")
    keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)).save(
        file := tmp_path_factory.mktemp("model") / "sum.keras"
    )
    target = records.Target(task="regression", num_outputs=1, columns=("sum",))
    return RawModel(TrainedModel("sums/1", file, ENCODING, target))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A model of images: the sum of the four pixels."""
    inputs = keras.Input((2, 2, 1), name="image", dtype="uint8")
    flat = keras.layers.Flatten()(keras.layers.Rescaling(1.0)(inputs))
    keras.Model(inputs, keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(flat)).save(
        file := tmp_path_factory.mktemp("model") / "pixels.keras"
    )
    return RawModel(TrainedModel("pixels/1", file, None, None))


def test_a_file_that_describes_a_model_larger_than_the_memory_is_refused_before_it_is_built(tmp_path):
    write_huge_model(file := tmp_path / "huge.keras")
    said = r"huge.keras describes a model whose variables take 8.0 TB"
    for module, code in ((None, None), ("json", tmp_path)):
        with pytest.raises(UserError, match=said):
            RawModel(TrainedModel("huge.keras", file, None, None, module, code))
    with pytest.raises(UserError, match=said):
        outputs.of_keras_file(str(file), {})


def test_only_an_error_about_a_class_mentions_the_users_classes(tmp_path):
    file = tmp_path / "own.keras"
    file.write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"Keras cannot load .*\)$"):
        RawModel(TrainedModel("own.keras", file, None, None, "json", tmp_path))
    write_model_of_unknown_class(file)
    for module, said in ((None, "for a run or a registered model, but not for a file"), ("json", "registered in json")):
        with pytest.raises(UserError, match=rf"Could not locate .*{said}"):
            RawModel(TrainedModel("own.keras", file, None, None, module, tmp_path))


def asked(model, given, kind="application/json"):
    body = given if isinstance(given, bytes) else json.dumps(given).encode()
    return model.outputs(read_request(model, kind, body)).ravel().tolist()


def test_rows_come_in_each_form_of_the_protocol(rows):
    table = [{"a": 1, "b": 2, "other": "x"}, {"a": "3", "b": 4.5}, {"b": 1}]
    for form in ("dataframe_records", "instances", "inputs"):
        assert asked(rows, {form: table}) == [3, 7.5, 6]
        assert asked(rows, {form: []}) == []
    assert asked(rows, {"dataframe_split": {"columns": ["b", "a"], "data": [[2, 1], [1, None]]}}) == [3, 6]
    assert asked(rows, {"inputs": {"a": [1, 2], "b": [3, 4]}}) == [4, 6]
    assert asked(rows, {"instances": {"a": [], "b": []}}) == []
    for delimiter in (b",", b";", b"\t"):
        body = b"b,a\n2,1\n1,\n".replace(b",", delimiter)
        assert asked(rows, body, "text/csv; charset=utf-8") == [3, 6]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (b"{", r"the body cannot be read as JSON \(Expecting .+\). Send JSON, or CSV with Content-Type: text/csv"),
        (b"[" * 100_000, "the body cannot be read as JSON"),
        (b"\xff\xfe", "the body cannot be read as JSON"),
        ([], "a JSON object with one of dataframe_split, dataframe_records, instances, inputs"),
        ({"inputs": [], "instances": []}, "a JSON object with one of"),
        ({"inputs": {"a": [1]}}, "these columns are missing: 'b'"),
        ({"inputs": {"a": [1, 2], "b": [3]}}, "the columns must be lists of the same length"),
        ({"inputs": {"a": 1, "b": 3}}, "the columns must be lists of the same length"),
        ({"inputs": {"a": [1], "b": 3}}, "the columns must be lists of the same length"),
        ({"inputs": [[1, 2]]}, "the model takes columns by name"),
        ({"dataframe_records": [[1, 2]]}, "dataframe_records must be a list of objects"),
        ({"dataframe_split": [[1, 2]]}, "dataframe_split must have the lists `columns` and `data`"),
        ({"dataframe_split": {"columns": ["a", "b"], "data": [[1, 2], [1]]}}, "row 1 does not have 2 values"),
        ({"dataframe_split": {"columns": ["a", "b", "a"], "data": [[1, 2, 3]]}}, "the column 'a' appears twice"),
        ({"inputs": {"a": ["x"], "b": [3]}}, "column 'a', row 0: 'x' is not a number"),
        ({"inputs": {"a": [[1]], "b": [3]}}, "column 'a', row 0: a list or an object is not a single value"),
        ({"inputs": {"a": [1, {"x": 1}], "b": [3, 3]}}, "column 'a', row 1: a list or an object is not a single"),
        ({"inputs": {"a": [1], "b": [None]}}, "column 'b', row 0: None is missing"),
    ],
)
def test_what_is_no_row_is_refused_with_the_reason(rows, given, message):
    with pytest.raises(BadRequest, match=message):
        asked(rows, given)


@pytest.mark.parametrize("body", [b"b,a\n2,1\n1\n", b"b,a\n2,1\n1,2,3\n"])
def test_a_row_of_another_length_is_no_row_with_missing_values(rows, body):
    with pytest.raises(BadRequest, match="row 1 does not have 2 values"):
        asked(rows, body, "text/csv")


def test_csv_of_a_model_that_learned_quotes_as_characters_keeps_them(rows, monkeypatch):
    monkeypatch.setattr(rows, "wanted", Wanted.of(ENCODING | {"csv": {"quoting": "none"}}, rows.takes))
    with pytest.raises(BadRequest, match="row 0: '\"2\"' is not a number"):
        asked(rows, b'b,a\n"2",1\n', "text/csv")


def test_images_come_as_pixels_or_as_files(images):
    file = io.BytesIO()
    Image.new("RGB", (8, 4), (7, 7, 7)).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    assert asked(images, {"inputs": [[[[1], [2]], [[3], [4]]]]}) == [10]
    assert asked(images, {"inputs": [[[1, 2], [3, 4]]]}) == [10]
    assert asked(images, {"instances": [text, f"data:image/png;base64,{text}"]}) == [28, 28]
    assert asked(images, {"dataframe_records": [{"image": text}]}) == [28]
    assert asked(images, {"inputs": []}) == []
    for wrong in ([[1, 2]], [[[[1], [2]]]], [[[[1], [2]], [[3], [256]]]], ["params.yaml"], [[1], [1, 2]], 7, "x", None):
        with pytest.raises(BadRequest):
            asked(images, {"inputs": wrong})
    assert schema(images)["inputs"] == [
        {"name": "image", "shape": [-1, 2, 2, 1], "dtype": "uint8", "or": "files of images as base64, (-1,)"}
    ]


def test_the_schema_says_what_is_taken_and_given(rows):
    assert schema(rows) == {
        "columns": [{"name": "a", "kind": "number"}, {"name": "b", "kind": "number"}],
        "outputs": {"task": "regression", "num_outputs": 1, "names": ["sum"]},
    }


def test_requests_that_wait_are_computed_together_and_each_has_its_own_answer(rows, images):
    began, go, calls = threading.Event(), threading.Event(), []
    compute = rows.outputs

    class Slow:
        """The model, which waits in its first call."""

        def outputs(self, features):
            calls.append(len(features["number"]))
            began.set()
            assert go.wait(60)
            return compute(features)

    slow, batches = Slow(), RequestBatcher()
    first = batches.outputs(slow, {"number": np.array([[1, 1]], np.float32)})
    assert began.wait(60)
    others = [batches.outputs(slow, {"number": np.full((count, 2), count, np.float32)}) for count in (1, 2, 3)]
    failing = batches.outputs(slow, {"number": np.ones((1, 3), np.float32)})
    pixels = batches.outputs(images, {"image": np.ones((1, 2, 2, 1), np.uint8)})
    go.set()
    assert first.result(60).tolist() == [[2]]
    with pytest.raises(Exception, match=r"dimension|shape|size"):
        failing.result(60)
    assert [one.result(60).ravel().tolist() for one in others] == [[2], [4, 4], [6, 6, 6]]
    assert pixels.result(60).tolist() == [[4]], "another model's request is computed by itself"
    assert calls == [1, 1, 2, 3, 1], "one that cannot be computed breaks none beside it"
    go.clear()
    first = batches.outputs(slow, {"number": np.array([[1, 1]], np.float32)})
    others = [batches.outputs(slow, {"number": np.full((count, 2), count, np.float32)}) for count in (1, 2, 3)]
    go.set()
    assert [one.result(60).ravel().tolist() for one in (first, *others)] == [[2], [2], [4, 4], [6, 6, 6]]
    assert sum(calls[5:]) == 7
    assert len(calls[5:]) <= 3, "those that waited, together"


class Asked:
    """An ASGI application, asked in this process."""

    def __init__(self, model):
        served = type("Served", (), {"model": model, "trouble": None})
        self.application = application(served, RequestBatcher())

    def __call__(self, *given, **named):
        return asyncio.run(self.ask(*given, **named))

    async def ask(self, path, content=b"", query=b"", method="POST", then=None):
        """Ask; ``then`` comes after the content, None where the content is all."""
        sent, messages = [], [{"type": "http.request", "body": content, "more_body": then is not None}]

        async def receive():
            if not messages:
                await then()
                return {"type": "http.disconnect"}
            return messages.pop()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": method, "path": path, "query_string": query, "headers": []}
        await self.application(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"]), dict(sent[0]["headers"])


def test_answers_say_which_version_gives_them_and_what_is_no_number_is_null(rows):
    ask = Asked(rows)
    good, bad = {"a": [1, 3e38, 2], "b": [2, 3e38, 2]}, {"a": [1]}
    status, answer, headers = ask("/invocations", json.dumps({"inputs": good}).encode())
    assert (status, answer) == (200, {"predictions": [[3], None, [4]]})
    assert headers[b"x-model"] == b"sums/1"
    told = ask("/invocations", json.dumps({"inputs": good}).encode(), b"top_k=1")[1]
    assert told == {"predictions": [{"prediction": 3}, None, {"prediction": 4}]}
    assert ask("/invocations", json.dumps({"inputs": good}).encode(), b"probabilities")[1] == told
    status, answer, _ = ask("/invocations", json.dumps({"inputs": bad}).encode())
    assert (status, answer["message"], answer["expected"]) == (400, "these columns are missing: 'b'", schema(rows))
    for wrong in (b"top_k=0", b"top_k=-1", b"top_k=" + b"9" * 5000, b"topk=2", "top_k=²".encode()):
        assert ask("/invocations", json.dumps({"inputs": good}).encode(), wrong)[0] == 400
    status, answer, _ = ask("/invocations", b" " * (server.MAX_BYTES + 1))
    said = "a request has at most 8,388,608 bytes: send several with fewer rows each"
    assert (status, answer) == (413, {"message": said})
    assert ask("/version", method="GET")[1] == {"model": "sums/1", "trouble": None}
    assert ask("/schema", method="GET")[1] == schema(rows)


def counted(rows, monkeypatch):
    """The list to which each call of the model adds its number of rows."""
    calls = []

    def outputs(features):
        calls.append(len(features["number"]))
        return RawModel.outputs(rows, features)

    monkeypatch.setattr(rows, "outputs", outputs)
    return calls


def test_a_large_request_is_computed_in_parts_and_one_that_is_too_large_is_refused(rows, monkeypatch):
    monkeypatch.setattr(server, "MOST_AT_ONCE", 4)
    monkeypatch.setattr(server, "MAX_ROWS", 10)
    calls = counted(rows, monkeypatch)
    ask, body = Asked(rows), lambda count: json.dumps({"inputs": {"a": [1] * count, "b": [2] * count}})
    assert ask("/invocations", body(10).encode())[1] == {"predictions": [[3]] * 10}
    assert calls == [4, 4, 2], "another request waits for one part at most"
    status, answer, _ = ask("/invocations", body(11).encode())
    assert (status, answer) == (413, {"message": "a request has at most 10 rows, and this one has 11: send several"})


def test_a_request_of_one_row_waits_for_at_most_one_part_of_a_large_one(rows, monkeypatch):
    monkeypatch.setattr(server, "MOST_AT_ONCE", 4)
    calls, meaning = counted(rows, monkeypatch), server.meaning
    writing, answered = threading.Event(), threading.Event()

    def slowly(*given):
        def tell(outputs):
            writing.set()
            assert answered.wait(60), "the server does nothing else while it writes a part of the answer"
            return meaning(*given)(outputs)

        return tell

    monkeypatch.setattr(server, "meaning", slowly)
    ask, large = Asked(rows), json.dumps({"inputs": {"a": [1] * 10, "b": [2] * 10}}) + " " * server.SMALL

    async def both():
        waiting = asyncio.create_task(ask.ask("/invocations", large.encode(), b"top_k=1"))
        assert await asyncio.to_thread(writing.wait, 60)
        small = await ask.ask("/invocations", b'{"inputs": {"a": [1], "b": [1]}}')
        answered.set()
        return small[1], (await waiting)[1]

    assert asyncio.run(both()) == ({"predictions": [[2]]}, {"predictions": [{"prediction": 3}] * 10})
    assert calls == [4, 1, 4, 2], "after the first part comes the other request"


def test_an_upload_that_does_not_end_is_ended_and_one_whose_client_leaves_is_one_line(rows, monkeypatch, caplog):
    monkeypatch.setattr(server, "UPLOAD_SECONDS", 0.1)
    ask = Asked(rows)
    status, answer, _ = ask("/invocations", b"{", then=lambda: asyncio.sleep(30))
    assert (status, answer) == (408, {"message": "the request was not complete after 0 s"})
    with contextlib.suppress(ValueError):  # Nobody reads the answer.
        ask("/invocations", b"{", then=lambda: asyncio.sleep(0))
    assert [record.message for record in caplog.records] == ["a client disconnected after 1 bytes of its request"]


@pytest.fixture
def port(rows, monkeypatch):
    """The port of a server of the model of rows, whose clients have 0.5 s for what takes them 30 otherwise."""
    monkeypatch.setattr(server, "UPLOAD_SECONDS", 0.5)
    serving = server.make_server(Asked(rows).application)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serving.run, args=([listening],))
        thread.start()
        yield listening.getsockname()[1]
        serving.should_exit = True
        thread.join()


@pytest.mark.parametrize("given", [b"", b"GET /ping HT", b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
@pytest.mark.parametrize("before", [b"", b"GET /ping HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"])
def test_a_connection_on_which_no_request_comes_is_ended(port, before, given):
    with socket.create_connection(("127.0.0.1", port), 60) as connection:
        answers = connection.makefile("rb")
        if before:
            connection.sendall(before)
            assert answers.readline() == b"HTTP/1.1 200 OK\r\n"
        connection.sendall(given)
        assert answers.read().count(b"HTTP/1.1") == 0, "read to its end"


def test_a_connection_on_which_requests_come_is_kept(port, monkeypatch):
    monkeypatch.setattr(server, "UPLOAD_SECONDS", 3.0)  # A busy machine may pause for two.
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.connect()
        first = connection.sock
        for _ in range(4):
            connection.request("GET", "/ping")
            assert connection.getresponse().read() == b"\n"
            time.sleep(0.9)
            assert connection.sock is first, "not connected anew"


@pytest.mark.slow
def test_the_version_that_an_alias_is_at_answers_and_the_last_one_while_there_is_trouble(store, caplog):
    name = Trained().register(right=0).model_name
    assert Trained().register().model_version == "2"
    client, address = open_store(), f"models:/{name}@champion"
    served = Served(address)
    assert served.model.name == f"{name}/2"

    def look():
        served.look()
        return served.model.name

    client.set_registered_model_alias(name, "champion", "1")
    assert look() == f"{name}/1"
    assert f"now serving {name}/1 instead of {name}/2" in caplog.text
    place = store.rename(store.with_name("away.db"))
    assert look() == f"{name}/1"
    assert served.trouble.startswith(f"{address} cannot be looked up (")
    assert caplog.text.count("Still serving") == 1
    look()
    assert caplog.text.count("Still serving") == 1, "told once"
    place.rename(store)
    assert look() == f"{name}/1"
    assert (served.trouble, caplog.text.count("can be looked up again")) == (None, 1)
    # The next version's file is damaged: the old one answers on.
    folder = Path(client.get_model_version(name, "2").source.removeprefix("file://"))
    (folder / "data" / "model.keras").write_bytes(b"damaged")
    client.set_registered_model_alias(name, "champion", "2")
    assert look() == f"{name}/1"
    assert f"{name}/2 is {address} now, but cannot be served" in served.trouble
    assert look() == f"{name}/1"
    client.set_registered_model_alias(name, "champion", "1")
    assert (look(), served.trouble) == (f"{name}/1", None)


@pytest.mark.slow
def test_of_versions_that_are_fetched_no_copy_stays(store, tmp_path, monkeypatch):
    name = Trained().register(right=0).model_name
    Trained().register()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{store.absolute()}")  # So MLflow is asked, not its file.
    (copies := tmp_path / "copies").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    client, served = open_store(), Served(f"models:/{name}@champion")
    for version in ("1", "2", "1"):
        client.set_registered_model_alias(name, "champion", version)
        served.look()
        ((taken, (shape, kind)),) = served.model.takes.items()
        assert served.model.outputs({taken: np.zeros((1, *shape), kind)}).shape == (1, 3)
        assert [path.name for path in copies.rglob("model.keras")] == []
