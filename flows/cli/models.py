"""The commands that use a trained model: `predict`, `serve-model`, `export`, `rollback`.

The parameters of a command are its options, however many it has.
"""

import os
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.cli import completion, tables
from flows.cli.command import Debug, Json, command, run_argument

if TYPE_CHECKING:
    from tasks.records import ExportedModel, Predicted, TensorShape

NO_INPUTS: list[str] = []
MAX_PREDICTED = 6
"""Columns of predictions."""
MODEL_HELP = (
    "models:/NAME@ALIAS or models:/NAME/VERSION; a run by its id or the first letters of it; `latest`; or a file "
    "FILE.keras. Without it, the only champion."
)
Inputs = Annotated[
    list[str],
    typer.Argument(
        metavar="[FILES|FOLDERS|-]",
        help="Images and folders of images; files of lines of text, and folders whose files are a text each; tables "
        "(.csv, .tsv, .jsonl, .parquet) with the columns that the model was trained on; arrays (.npy, .npz); - is "
        "standard input.",
        show_default=False,
    ),
]
Model = Annotated[str | None, typer.Option("--model", metavar="MODEL", help=MODEL_HELP, autocompletion=completion.runs)]


def predict(
    inputs: Inputs = NO_INPUTS,
    model: Model = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Written whole or not at all: .jsonl, .csv, .parquet, or .html with images.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="Of the output: jsonl, csv, parquet, html. Without --output, jsonl and csv "
            "go to standard output, each example as soon as it is computed.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that is there.")] = False,
    top_k: Annotated[int, typer.Option("--top-k", min=1, metavar="N", help="How many classes to print.")] = 1,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Tell those of all classes.")] = False,
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, metavar="N", help="Examples that are computed at once.")
    ] = None,
    encoding: Annotated[str, typer.Option("--encoding", metavar="NAME", help="Of texts in files.")] = "utf-8",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Tell what a trained model makes of raw inputs: images of any size, texts, rows of a table.

    What is broken has its error in place of a prediction, and the others have theirs; the exit code is then 1.
    """
    with command(debug):
        from tasks.operations import model_use
        from tasks.system.errors import StratagemError, UserError

        if json and output is None and format is not None:
            raise UserError("--json and --format both print to standard output: give --output FILE, or one of them")
        found = model_use.predict(inputs, model, output, format, force, top_k, probabilities, batch_size, encoding)
        if json:
            print(found.model_dump_json())
        elif format is None or output is not None:
            _print_predictions(found)
        if found.num_failed:
            raise StratagemError(
                f"{found.num_failed:,} of {found.num_examples:,} examples have no prediction: the column `error` says "
                "why"
            )


def _print_predictions(result: "Predicted") -> None:
    """Print the first predictions, how many there are of each class, and where the file with all of them lies."""
    from tasks.system.errors import cut

    several = len({row["source"] for row in result.first}) > 1
    hidden = {"source"} if not several and any(row["row"] is not None for row in result.first) else set()
    if all(row["row"] is None for row in result.first):
        hidden |= {"row"}
    if not any(row["error"] for row in result.first):
        hidden |= {"error"}
    names = [name for name in (result.first[0] if result.first else ()) if name not in hidden]
    shown = names[:MAX_PREDICTED]
    # Of an error each word counts.
    rows = [[row[name] if name == "error" else _cell(row[name]) for name in shown] for row in result.first]
    tables.print_table(shown, rows, right=[name for name in shown if name.startswith(("row", "probability"))])
    if len(names) > MAX_PREDICTED:
        print(f"and {len(names) - MAX_PREDICTED} columns more: --output or --format has all")
    if (more := result.num_examples - len(result.first)) > 0:
        print(f"and {more:,} examples more" + ("" if result.output else ": --output or --format has all"))
    most = sorted(result.counts.items(), key=lambda one: (-one[1], one[0]))
    counts = cut(", ".join(f"{name}: {count:,}" for name, count in most))
    about = {"model": result.model, "examples": f"{result.num_examples:,}, {result.num_failed:,} failed"}
    about |= {"predicted": counts} if counts else {}
    print()
    tables.print_rows(about | {"on": ", ".join(result.devices), "seconds": f"{result.seconds:.1f}"})
    if result.output is not None:
        print(result.output)


def _cell(value: object) -> str:
    from tasks.system.errors import cut

    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else cut(str(value), 60)


def serve_model(
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, show_default=False)] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, metavar="N", help="Of 127.0.0.1; 0 is any that is free.")
    ] = 5001,
    poll: Annotated[
        float, typer.Option("--poll", min=0.1, metavar="SECONDS", help="How often it is looked where the alias is.")
    ] = 2.0,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Serve a model on 127.0.0.1 until Ctrl-C, by the protocol of MLflow's scoring server; it follows the alias.

    The key is random at each start; or what STRATAGEM_KEY holds, USER:PASSWORD.
    """
    with command(debug):
        from flows.operate.prefect_server import make_password
        from tasks.operations import model_use
        from tasks.records import Serving
        from tasks.system.errors import UserError

        key = os.environ.get("STRATAGEM_KEY") or make_password()
        user, colon, password = key.partition(":")
        if not (user and colon and password):
            raise UserError("STRATAGEM_KEY: write it as USER:PASSWORD, or unset it: then the password is random")

        def tell(serving: Serving) -> None:
            address = f"http://127.0.0.1:{serving.port}"
            if json:
                found = {"url": address, "model": serving.model, "user": user, "password": password}
                print(dumps(found), flush=True)
                return
            print(f"Model    {serving.model}")
            print(f"Ask      {address}/invocations; /schema, /version, /health")
            secret = "that of STRATAGEM_KEY" if os.environ.get("STRATAGEM_KEY") else password
            print(f"User     {user}, password {secret}   by Basic authentication", flush=True)
            print("Ctrl-C ends it.", flush=True)

        model_use.serve(model, port, poll, key, tell)


def export(
    run_id: Annotated[
        str,
        run_argument(
            "A run by its id or the first letters of it; `latest`; models:/NAME@ALIAS or models:/NAME/VERSION."
        ),
    ],
    format: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="A file of tasks/serving/formats/, such as keras or savedmodel.",
            autocompletion=completion.formats,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="FOLDER", help="A folder that is not there yet; without it, one of the run's."),
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="latest|best", help="Without it, the latest.")
    ] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Write the model of a run as files of a format, and compare what these give with Keras on the test split.

    Beside the files lies export.json: where the model comes from, what it takes and gives, and the sha256 of each file.
    """
    with command(debug):
        from tasks.operations import pipeline
        from tasks.process import client, stages
        from tasks.serving import formats

        formats.find_format(format)
        settings, prepared, running, which = pipeline.find_model(run_id, checkpoint)
        folder = str(to.absolute()) if to is not None else None
        result = stages.export(settings, prepared=prepared, run=running, format=format, checkpoint=which, folder=folder)
        client.stop_processes()
        print(result.model_dump_json()) if json else print_export(result)


def print_export(result: "ExportedModel") -> None:
    """Print what an export ends with: what the model takes and gives, how far it is from Keras, where it lies."""
    from tasks.records import HEADLINES

    rows = {
        "run": result.run_id,
        "checkpoint": result.checkpoint,
        "format": result.format,
        "takes": ", ".join(f"{one.name}: {_shape(one)}" for one in result.inputs),
        "gives": ", ".join(map(_shape, result.outputs)),
        "checked": f"{result.num_examples:,} test examples, at most {result.max_difference:.2g} from Keras",
        "files": ", ".join(result.files),
    }
    if result.metrics and result.keras_metrics:
        name = next(f"test/{name}" for name in HEADLINES.values() if f"test/{name}" in result.metrics)
        rows["rounded"] = f"{name} {result.metrics[name]:.4f}, Keras' {result.keras_metrics[name]:.4f}"
    tables.print_rows(rows)
    print(result.folder)  # On a line of its own, as nothing shorter can be opened.


def _shape(one: "TensorShape") -> str:
    return f"{one.dtype} ({', '.join(str(size or 'any') for size in one.shape)})"


def rollback(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A registered model, such as digits-convnet2.")],
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Move @champion of a registered model back to the version that had it before, if that still gives what it gave."""
    with command(debug):
        from tasks.operations import pipeline

        tables.print_record(pipeline.rollback(model), json, ("model_name", "before", "now", "missing", "loaded_back"))
