"""Move the alias `champion` back to the version that had it before, if that can still be loaded and gives what it gave
when it was evaluated."""

from typing import Any, NamedTuple

import numpy.typing as npt

from tasks import config, records, runs, tracking
from tasks.data import prepared_data
from tasks.evaluation.predictions import Predictions, load, takes_digest, test_rows
from tasks.records import EvaluationResult, PreparedDataset, RolledBack, Run
from tasks.serving import loaded_back
from tasks.serving.loaded_back import Apart
from tasks.system.errors import StratagemError, UserError


class AtHand(NamedTuple):
    """What is here of the data and the evaluation of a version."""

    run: Run | None = None
    """That it was made of."""
    prepared: PreparedDataset | None = None
    """The data of that run, if the version can be given their test rows as they are now."""
    evaluated: Predictions | None = None
    """What it gave for these when it was evaluated."""
    missing: str = ""
    """Why there is nothing to compare with; empty if there is."""


def rollback(name: str, apart: Apart) -> RolledBack:
    """Move the alias back, after the model was loaded back as a registration does it.

    What is not here any more, data or outputs of the evaluation, is not compared; the record says so.

    Args:
        name: of the registered model.
        apart: computes what the model gives, in a process that knows nothing of the run.

    Raises:
        UserError: there is no such registered model, no version that was the champion before, or that one cannot be
            loaded, gives no numbers or something else now, or was deleted meanwhile: then the alias stays.
        Unavailable: the tracking server does not answer, or fails.
        StratagemError: another process is moving the alias, or has moved it meanwhile.
    """
    with tracking.registering():
        back = tracking.find_rollback(name)
        seen = _load_back(back, _at_hand(back), apart)
        tracking.rollback(back)
    return RolledBack(model_name=name, before=back.champion, now=back.version, missing=back.missing, loaded_back=seen)


def _at_hand(back: tracking.Rollback) -> AtHand:
    """Return what is here of a version's data and evaluation."""
    run = None if back.run_id is None else runs.look_up(back.run_id)
    if run is None:
        return AtHand(missing="the run that it was made of is not here")
    folder = f"data/{run.settings['dataset']['name']}/prepared"
    try:
        prepared = records.load(PreparedDataset, config.project_root() / folder / "manifest.json")
        prepared_data.verify(prepared)
    except UserError:
        return AtHand(run, missing=f"{folder} is missing or damaged")
    if back.tags.get("takes_digest") != takes_digest(prepared):
        return AtHand(run, missing=f"{folder} has other columns, image sizes, vocabularies or classes now")
    if back.tags.get("test_rows") != test_rows(prepared):
        return AtHand(run, prepared, missing=f"{folder} has other test rows now")
    place = config.project_root() / back.tags.get("test_outputs", "")
    evaluated = load(place, back.tags.get("test_outputs_sha256", ""))
    missing = "" if evaluated is not None else "what it gave when it was evaluated is not here any more"
    return AtHand(run, prepared, evaluated, missing)


def _load_back(back: tracking.Rollback, here: AtHand, apart: Apart) -> str:
    """Load a version back, and return a sentence about what it gives.

    Raises:
        UserError: it cannot be loaded, gives no numbers, or something else than when it was evaluated.
    """
    prepared = here.prepared
    count = 0 if prepared is None else prepared.splits["test"].num_examples
    rows = loaded_back.sample(count) if count else None
    try:
        outputs = _outputs(back, prepared, rows, apart)
        if prepared is None:
            loaded_back.check_numbers(outputs)
        else:
            loaded_back.check(outputs, prepared, rows)
    except tracking.Unavailable:
        raise
    except StratagemError as error:
        raise _refusal(back, f"it cannot be loaded back in a clean process: {error}") from None
    if prepared is None or rows is None:
        computed = "an example of no meaning" if outputs.size else "nothing"  # Another program's may have no example.
        return f"it was loaded, and computed {computed}; nothing was compared: {here.missing}"
    if here.evaluated is None or here.run is None:
        return f"it was loaded, and computed {len(rows)} test rows; nothing was compared: {here.missing}"
    other = loaded_back.difference(outputs, here.evaluated.outputs, rows, _tolerance(here.run, back))
    if other is not None:
        raise _refusal(back, f"loaded back in a clean process {other}")
    return f"it was loaded, and gives what it gave when it was evaluated, compared on {len(rows)} test rows"


def _outputs(
    back: tracking.Rollback, prepared: PreparedDataset | None, rows: list[int] | None, apart: Apart
) -> npt.NDArray[Any]:
    """Return what a version gives: of the project's own store as who serves it would load it; of a server, where others
    may have written to it, by its .keras file alone, because what MLflow loads beside that is code."""
    if tracking.is_own_store():
        return loaded_back.through_mlflow(back.place, apart, prepared, rows)
    if not {"keras_file_sha256", "model", "model_digest", "weights_digest"} <= set(back.tags):
        raise UserError(
            "this project did not register it, and a server's model that says nothing of itself may be code"
        )
    return loaded_back.of_keras_file(back.name, back.version, back.tags, apart, prepared, rows)


def _tolerance(run: Run, back: tracking.Rollback) -> float:
    evaluation = runs.load_result(run, EvaluationResult)
    if evaluation is None or evaluation.outputs_sha256 != back.tags.get("test_outputs_sha256"):
        return loaded_back.COARSE_TOLERANCE  # The run was evaluated once more since: nothing says on which device.
    return loaded_back.tolerance(run, evaluation)


def _refusal(back: tracking.Rollback, reason: str) -> UserError:
    stays = "no version" if back.champion is None else f"version {back.champion}"
    return UserError(
        f"'{back.name}' cannot be rolled back to version {back.version}: {reason}. @{config.CHAMPION} stays at "
        f"{stays}. Delete version {back.version} in MLflow, and `stratagem rollback {back.name}` takes the one before "
        "it; or move the alias on MLflow's page, where nothing is checked"
    )
