"""The commands that use a trained model: `predict` and `models serve`, `export` and `rollback`."""

import os
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli import completion, tables
from flows.cli.command import JSON, Result, argument, option, run_argument
from tasks.system import units
from tasks.system.errors import StratagemError, UserError, cut

if TYPE_CHECKING:
    from tasks.records import TensorShape

MAX_PREDICTED = 6
"""The maximum number of columns in the table of predictions."""
MODEL_HELP = (
    "models:/NAME@ALIAS or models:/NAME/VERSION; a run's id or the first characters of it; `latest`; or FILE.keras. "
    "By default the only champion."
)
INPUTS = argument(
    "FILES|FOLDERS|-",
    "Images and folders of images; text files with a text per line, and folders with a text per file; tables "
    "(.csv, .tsv, .jsonl, .parquet) with the columns of the training data; arrays (.npy, .npz); - is standard "
    "input.",
    show_default=False,
    default=[],
)
MODEL = option("--model", MODEL_HELP, "MODEL", complete=completion.runs)


def list_() -> Result:
    """List the versions of registered models, with their aliases and the evidence for them."""
    from tasks.process import stages

    found = stages.list_versions()
    yield found
    if not found:
        print("There are no versions yet: `stratagem run` registers a model that passes the gate.")
    for one in found:
        aliases = "".join(f" @{alias}" for alias in one.aliases)
        figures = ", ".join(f"{key} {text}" for key, text in one.tags.items() if key.startswith("test/"))
        lines = [f"run {one.run_id or 'unknown'}" + (f", {figures}" if figures else ""), one.tags.get("gate", "")]
        tables.print_text(f"{one.name}/{one.version}{aliases}")
        for line in filter(None, lines):
            tables.print_text(f"  {line}")


def predict(
    inputs: list[str] = INPUTS,
    model: str | None = MODEL,
    output: Path | None = option(
        "--output",
        "Output file, written completely or not at all: .jsonl, .csv, .parquet, or .html with images.",
        "FILE",
    ),
    format: str | None = option(
        "--format",
        "Format of the output: jsonl, csv, parquet, html. Without --output, jsonl and csv go to standard "
        "output, each example as soon as it is computed.",
        "NAME",
    ),
    force: bool = option("--force", "Replace an existing output."),
    top_k: int = option("--top-k", "Number of classes to print.", "N", min=1, default=1),
    probabilities: bool = option("--probabilities", "Print the probabilities of all classes."),
    batch_size: int | None = option("--batch-size", "Number of examples to compute at once.", "N", min=1),
    encoding: str | None = option(
        "--encoding", "Encoding of texts in files, by default as in training, or UTF-8.", "NAME"
    ),
    json: bool = JSON,
) -> Result:
    """Predict with a trained model: images, texts, tables, arrays.

    A broken example gets an error instead of a prediction; the others get predictions, and the exit code is 1.
    """
    from tasks.operations import model_use

    if json and output is None and format is not None:
        raise UserError("--json and --format both print to standard output: use only one of them, or add --output FILE")
    found = model_use.predict(inputs, model, output, format, force, top_k, probabilities, batch_size, encoding)
    yield found
    if format is None or output is not None:
        hidden = {name for name in ("row", "error") if all(row[name] in (None, "") for row in found.first)}
        if len({row["source"] for row in found.first}) == 1 and "row" not in hidden:
            hidden |= {"source"}
        names = [name for name in (found.first[0] if found.first else ()) if name not in hidden]
        shown = names[:MAX_PREDICTED]
        # Do not cut errors.
        rows = [[row[name] if name == "error" else _cell(row[name]) for name in shown] for row in found.first]
        tables.print_table(shown, rows, right=[name for name in shown if name.startswith(("row", "probability"))])
        if len(names) > MAX_PREDICTED:
            print(f"and {len(names) - MAX_PREDICTED} more columns: --output or --format shows all")
        if (more := found.num_examples - len(found.first)) > 0:
            print(f"and {more:,} more examples" + ("" if found.output else ": --output or --format shows all"))
        most = sorted(found.counts.items(), key=lambda one: (-one[1], one[0]))
        counts = cut(", ".join(f"{name}: {count:,}" for name, count in most))
        about = {"model": found.model, "examples": f"{found.num_examples:,}, {found.num_failed:,} failed"}
        about |= {"predicted": counts} if counts else {}
        print()
        tables.print_rows(about | {"on": ", ".join(found.devices), "seconds": f"{found.seconds:.1f}"})
        if found.output is not None:
            print(found.output)
    if found.num_failed:
        raise StratagemError(
            f"{found.num_failed:,} of {found.num_examples:,} examples have no prediction: the column `error` says why"
        )


def _cell(value: object) -> str:
    if isinstance(value, float):
        return units.number(value, 4)
    return "" if value is None else cut(str(value), 60)


def serve(
    model: str | None = argument("MODEL", MODEL_HELP, show_default=False, default=None),
    port: int = option("--port", "Port on 127.0.0.1; 0 takes a free one.", "N", min=0, max=65535, default=5001),
    poll: float = option("--poll", "How often to look up the alias.", "SECONDS", min=0.1, default=2.0),
    json: bool = JSON,
) -> None:
    """Serve a model on 127.0.0.1 until Ctrl-C.

    Uses the protocol of MLflow's scoring server, and loads the new version when the alias moves. Each start creates a
    random key, unless STRATAGEM_KEY contains one as USER:PASSWORD.
    """
    from flows.operate.prefect_server import make_password
    from tasks.operations import model_use

    key = os.environ.get("STRATAGEM_KEY") or make_password()
    user, colon, password = key.partition(":")
    if not (user and colon and password):
        raise UserError("STRATAGEM_KEY: write it as USER:PASSWORD, or unset it for a random password")

    def tell(model: str, port: int) -> None:
        address = f"http://127.0.0.1:{port}"
        if json:
            found = {"url": address, "model": model, "user": user, "password": password}
            print(dumps(found), flush=True)
            return
        print(f"Model    {model}")
        print(f"Ask      {address}/invocations; /schema, /version, /health")
        secret = "that of STRATAGEM_KEY" if os.environ.get("STRATAGEM_KEY") else password
        print(f"User     {user}, password {secret}   by Basic authentication", flush=True)
        print("Press Ctrl-C to stop it.", flush=True)

    model_use.serve(model, port, poll, key, tell)


def export(
    run_id: str = run_argument(
        "A run's id or the first characters of it; `latest`; models:/NAME@ALIAS or models:/NAME/VERSION."
    ),
    format: str = option(
        "--format",
        "The format: a file name in tasks/serving/formats/, such as keras or savedmodel.",
        "NAME",
        complete=completion.formats,
        default=...,
    ),
    to: Path | None = option("--to", "A new folder; by default one in the run's folder.", "FOLDER"),
    checkpoint: str | None = option("--checkpoint", "Which model; by default the latest.", "latest|best"),
) -> Result:
    """Export a model and compare it with Keras.

    Compares the outputs on the test split. export.json records the model's run and data, its inputs and outputs, and
    the sha256 of each file.
    """
    from tasks.operations import pipeline
    from tasks.process import client, stages
    from tasks.records import HEADLINES
    from tasks.serving import formats

    formats.find_format(format)
    settings, prepared, running, which = pipeline.find_model(run_id, checkpoint)
    folder = str(to.absolute()) if to is not None else None
    result = stages.export(settings, prepared=prepared, run=running, format=format, checkpoint=which, folder=folder)
    client.stop_processes()
    yield result
    rows = {
        "run": result.run_id,
        "checkpoint": result.checkpoint,
        "format": result.format,
        "inputs": ", ".join(f"{one.name}: {_shape(one)}" for one in result.inputs),
        "outputs": ", ".join(map(_shape, result.outputs)),
        "checked": f"{result.num_examples:,} test examples, at most {result.max_difference:.2g} from Keras",
        "files": ", ".join(result.files),
    }
    if result.metrics and result.keras_metrics:
        name = next(f"test/{name}" for name in HEADLINES.values() if f"test/{name}" in result.metrics)
        ours, keras = units.metric(result.metrics[name]), units.metric(result.keras_metrics[name])
        rows["rounded"] = f"{name} {ours}, Keras' {keras}"
    tables.print_rows(rows)
    print(result.folder)  # On its own line, to be copied.


def _shape(one: "TensorShape") -> str:
    return f"{one.dtype} ({', '.join(str(size or 'any') for size in one.shape)})"


def rollback(
    model: str = argument("MODEL", "A registered model, such as digits-convnet2."),
) -> Result:
    """Move a model's @champion back to the previous version.

    That version is loaded first, and must reproduce the outputs of its evaluation.
    """
    from tasks.process import stages

    done = stages.roll_back(name=model)
    yield from tables.show_record(done, ("model_name", "before", "now", "missing", "loaded_back"))
