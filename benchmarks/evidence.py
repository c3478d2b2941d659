"""What it costs to know how good a model is, and to find it again: a run with and without, and a list of many runs."""

import contextlib
import json
import os
import shutil
import statistics
import tempfile
from functools import partial
from pathlib import Path

from benchmarks import measure
from benchmarks.pipeline import BIN, Measured

HEADING, HISTORY_HEADING = "## Evidence\n", "## Many runs\n"
EPOCHS = 5
ALL, LESS = "run, with a floor for a class and one for a slice", "run, no gate, less its report"
QUESTION = measure.Question("all of it / without", ALL, LESS, "at most", 1.10)
FLOORS = {"0": 0.0, "class: 0": 0.0}
"""No model is below them: all slices are computed, and nothing else becomes of the run."""
RUNS = 1000
MOST_SECONDS = 1.0
COMMANDS, NOTHING = ("runs", "trace latest", "trace digits"), "runs --help"


def section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure a run of 5 epochs with its evidence and without; return the page's section."""
    found = Measured()
    values = {"train.epochs": EPOCHS}

    def less() -> float:
        seconds = found.run(LESS, dataset, {**values, "register.enabled": False}, "--fresh")
        # No setting leaves the report out: the stage's own time is taken off.
        return seconds - float(found.records[LESS][-1]["seconds"]["report"])

    variants = {ALL: lambda: found.run(ALL, dataset, {**values, "register.floors": FLOORS}, "--fresh"), LESS: less}
    seconds = measure.alternate("evidence", repeats, variants)
    stages = [one["seconds"] for one in found.records[ALL]]
    by_stage = ", ".join(f"{name} {measure.spread([one[name] for one in stages], 1)}" for name in stages[0])
    lines = [
        HEADING,
        f"{measure.machine('tensorflow', 'keras', 'mlflow')}. {repeats} repeats, alternated; median (range). "
        f"{dataset}, {EPOCHS} epochs, on data that are prepared and judged already, without a Prefect server.",
        "",
        *found.table(seconds),
        *measure.answers([QUESTION], seconds),
        "",
        f"Without are the model's loading back, the gate and the version (`register.enabled=false`), and the seconds "
        f"that the report takes. Seconds of all of it by stage: {by_stage}.",
        "",
    ]
    return "\n".join(lines)


def history_section(dataset: str, epochs: int, repeats: int) -> str:
    """Measure what looks at all runs where there are 1,000; return the page's section."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder) / "project"
        stratagem = str(BIN / "stratagem")
        measure.run([stratagem, "init", str(project), "--no-git"], folder=Path(folder))
        alone = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
        _, output = measure.run([stratagem, "run", "--json", "--set", "train.epochs=1"], alone, project)
        copy_run(project / "mlruns" / "runs" / json.loads(output)["run_id"], RUNS - 1)
        processor: dict[str, list[float]] = {words: [] for words in (*COMMANDS, NOTHING)}

        def ask(words: str) -> float:
            done = measure.watch([stratagem, *words.split()], alone, project)
            processor[words].append(done.processor_seconds)
            return done.seconds

        variants = {words: partial(ask, words) for words in processor}
        seconds = measure.alternate("history", repeats, variants)
    lines = [
        HISTORY_HEADING,
        f"{measure.machine('mlflow')}. {repeats} repeats, alternated; median (range). {RUNS:,} runs of digits: one "
        "that was trained, and its records under other ids.",
        "",
        "| command | processor seconds | seconds | wanted | met |",
        "|---|---|---|---|---|",
        *(
            f"| `stratagem {words}` | {measure.spread(processor[words])} | {measure.spread(seconds[words])} | at most "
            f"{MOST_SECONDS} | "
            f"{'yes' if statistics.median(seconds[words]) <= MOST_SECONDS else '**no**'} |"
            for words in COMMANDS
        ),
        f"| `stratagem {NOTHING}`, which looks at no run | {measure.spread(processor[NOTHING])} | "
        f"{measure.spread(seconds[NOTHING])} | | |",
        "",
    ]
    return "\n".join(lines)


def copy_run(folder: Path, count: int) -> None:
    """Make so many runs of one, which differ in id and number; what is not text of theirs is linked, not copied."""
    for number in range(2, count + 2):
        run_id = f"{number:032x}"
        made = folder.with_name(run_id)
        shutil.copytree(folder, made, copy_function=_link)
        for path in (made / "summary.json", made / "status.json", *(made / "records").glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                values = json.loads(path.read_text(encoding="utf-8").replace(folder.name, run_id))
                if path.name == "run.json":
                    values |= {"number": values["number"] + number - 1, "start_time": values["start_time"] + number}
                path.unlink()  # It is a link to the file of the run that was trained.
                path.write_text(json.dumps(values), encoding="utf-8")


def _link(source: str, target: str) -> None:
    os.link(source, target)
