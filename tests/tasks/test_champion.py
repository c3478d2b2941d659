"""The alias `champion`: who gets it, who does not and why, and back again; on a real MLflow store."""

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from filelock import FileLock

from tasks import records
from tasks.evaluation import slices
from tasks.runs import lineage
from tasks.serving import loaded_back
from tasks.serving.outputs import of_keras_file
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import registry
from tasks.tracking.store import is_own_store, open_store
from tests.tasks.killed_registrations import BETTER, WORSE
from tests.tasks.registering import IMAGES, LABELS, Trained, roll_back

CHECKOUT = Path(__file__).resolve().parents[2]
Run = Callable[..., Any]


def aliases(name: str) -> dict[str, str]:
    model = open_store().get_registered_model(name)
    return {alias: str(version) for alias, version in model.aliases.items()}


def history(name: str) -> str:
    return open_store().get_registered_model(name).tags.get("champion_history", "")


def no_apart(*given: object, **more: object) -> Any:
    raise AssertionError("nothing is loaded")


def test_a_better_model_takes_the_alias_and_noise_and_the_same_model_do_not(store: Path) -> None:
    first = Trained().register(right=WORSE)
    name = first.model_name
    assert (aliases(name), history(name)) == ({"challenger": "1", "champion": "1"}, "1")

    noise = Trained()
    result = noise.register(right=4)
    assert result.aliases == ("challenger",)
    assert (result.judgement.promoted, result.judgement.p_value) == (False, 1 / 16)
    reason = (
        "test/accuracy 0.8000 against 0.0000 of version 1 is better by +0.8000 (95% interval +0.4000 to +1.0000, "
        "McNemar p = 0.062, 5 test rows): this could be chance: p must be at most 0.05 (register.confidence = 0.95)"
    )
    assert result.judgement.reason == reason
    assert aliases(name) == {"challenger": "2", "champion": "1"}
    client = open_store()
    for tags in (client.get_model_version(name, "2").tags, client.get_run(noise.run.run_id).data.tags):
        assert tags["gate"] == reason
        assert "forced" not in tags

    better = Trained()
    result = better.register(right=BETTER)
    assert result.aliases == ("challenger", "champion")
    assert (result.judgement.promoted, result.judgement.against, result.judgement.p_value) == (True, "1", 1 / 32)
    assert (aliases(name), history(name)) == ({"challenger": "3", "champion": "3"}, "1, 3")
    assert client.get_model_version(name, "3").tags["gate"] == result.judgement.reason

    again = better.register(right=BETTER, apart=no_apart)
    assert (again.model_version, again.aliases) == ("3", ("challenger", "champion"))
    assert again.judgement.reason == "this model is already @champion"
    promoted_on = client.get_model_version(name, "3").tags["gate"]
    added = f"; run {better.run.run_id[:6]}: this model is already @champion"
    assert promoted_on == result.judgement.reason + added, "the evidence stays"
    better.register(right=BETTER, apart=no_apart)
    assert client.get_model_version(name, "3").tags["gate"] == promoted_on
    assert history(name) == "1, 3"


def test_a_first_model_below_a_floor_is_no_champion(store: Path) -> None:
    result = Trained("register.floors={b: 0.8}").register(recall=0.7)
    assert result.aliases == ("challenger",)
    assert result.judgement.told == "none: register.floors: 'b' has a recall of 0.7000 among 2 examples and needs 0.8"
    assert aliases(result.model_name) == {"challenger": "1"}
    assert Trained("register.floors={b: 0.8}").register(recall=0.8).aliases == ("challenger", "champion")
    with pytest.raises(UserError, match=r"unknown class in register\.floors 'd'"):
        Trained("register.floors={d: 0.8}").register()


def test_a_first_model_with_a_slice_below_its_floor_is_no_champion(store: Path, monkeypatch) -> None:
    monkeypatch.setattr(slices, "FEWEST", 2)
    trained = Trained()
    found = slices.every("classification", ("a", "b", "c"), LABELS, slices.load(trained.prepared))
    name = next(one.full_name for one in found if one.by == "brightness of image" and one.rows.sum() == 2)
    np.save(trained.prepared.splits["test"].labels, LABELS)
    below = Trained(f"register.floors={{'{name}': 0.6}}")
    result = below.register(right=0)
    assert result.aliases == ("challenger",)
    reason = f"register.floors: '{name}' has an accuracy of 0.0000 among 2 examples and needs 0.6"
    assert result.judgement.told == f"none: {reason}"
    client = open_store()
    for tags in (
        client.get_model_version(result.model_name, "1").tags,
        client.get_run(below.run.run_id).data.tags,
    ):
        assert tags["gate"] == reason
    assert Trained(f"register.floors={{'{name}': 0.6}}").register(right=5).aliases == ("challenger", "champion")


def test_what_is_forced_is_put_down_and_rolled_back(store: Path) -> None:
    name = Trained().register(right=BETTER).model_name
    worse = Trained()
    assert worse.register(right=WORSE).aliases == ("challenger",)
    result = worse.register(right=WORSE, force=True)
    assert result.aliases == ("challenger", "champion")
    assert result.judgement.forced
    assert result.judgement.reason.startswith("--force, against the evidence: test/accuracy 0.0000 against 1.0000")
    client = open_store()
    for tags in (client.get_model_version(name, "2").tags, client.get_run(worse.run.run_id).data.tags):
        assert tags["forced"] == "true"
        assert tags["gate"].endswith(result.judgement.reason)
    assert (aliases(name)["champion"], history(name)) == ("2", "1, 2")

    loaded = "it was loaded and computed a row of zeros; there is nothing to compare it with: "
    gone = "data/digits/prepared is missing or damaged"
    assert roll_back(name) == records.RolledBack(model_name=name, before="2", now="1", loaded_back=loaded + gone)
    assert (aliases(name)["champion"], history(name)) == ("1", "1")
    with pytest.raises(UserError, match=f"'{name}' cannot be rolled back: version 1 is the first that was @champion"):
        roll_back(name)
    with pytest.raises(UserError, match=f"unknown registered model '{name[:-1]}': did you mean '{name}'"):
        roll_back(name[:-1])


@pytest.mark.exhaustive
def test_a_version_that_was_rolled_back_is_the_champion_again_by_force_alone(store: Path) -> None:
    name = Trained().register(right=WORSE).model_name
    better = Trained()
    better.register(right=BETTER)
    roll_back(name)
    result = better.register(right=BETTER)
    assert "version 2 was @champion and was rolled back at 20" in result.judgement.reason
    assert (result.aliases, aliases(name)["champion"]) == (("challenger",), "1")
    assert better.register(right=BETTER, force=True).aliases == ("challenger", "champion")
    assert history(name) == "1, 2"


def two_champions() -> tuple[str, Trained]:
    """Register a model and then a better one; return the name of both, and the first."""
    first = Trained()
    name = first.register(right=WORSE).model_name
    records.save(first.prepared, Path(first.prepared.folder, "manifest.json"))
    Trained().register(right=BETTER)
    assert aliases(name)["champion"] == "2"
    return name, first


def as_worse(what: str, features: dict[str, Path], rows: list[int] | None = None, **arguments: Any) -> np.ndarray:
    """Load back the worse of two models."""
    assert (what, list(features), rows) == ("score", ["image"], [0, 1, 2, 3, 4])
    assert keras.saving.load_model(arguments["file"])
    return np.eye(3)[(LABELS + 1) % 3]


def test_a_model_is_loaded_back_before_it_is_the_champion_again(store: Path) -> None:
    name, _ = two_champions()
    said = "it was loaded, and its outputs for 5 test rows equal those of its evaluation"
    assert roll_back(name, as_worse) == records.RolledBack(model_name=name, before="2", now="1", loaded_back=said)
    assert aliases(name)["champion"] == "1"


def test_a_model_that_is_another_one_by_now_does_not_get_the_alias_back(store: Path) -> None:
    name, _ = two_champions()
    with pytest.raises(UserError, match=f"'{name}' cannot be rolled back to version 1: ") as caught:
        roll_back(name, lambda *given, **more: np.eye(3)[LABELS])
    assert "loaded back in a clean process, its outputs differ from those of its" in str(caught.value)
    assert "@champion stays at version 2. Delete version 1 in MLflow" in str(caught.value)
    assert (aliases(name)["champion"], history(name)) == ("2", "1, 2")
    assert "rolled_back" not in open_store().get_model_version(name, "2").tags


def name_own_code(name: str) -> Path:
    """Have version 1 name a module of the project's folder, as who may write to a server can; return what that writes
    where it is imported."""
    Path("planted.py").write_text("open('imported', 'w').close()\n")
    client = open_store()
    version = client.get_model_version(name, "1")
    file = Path(client.get_model_version_download_uri(name, "1").removeprefix("file://"), "data", "model.keras")
    client.set_model_version_tag(name, "1", "model", "planted:build")
    digest = lineage.model_digest(file, version.tags["weights_digest"], "planted:build")
    client.set_model_version_tag(name, "1", "model_digest", digest)
    return Path("imported")


def as_clean(what: str, features: dict[str, Path], rows: list[int] | None = None, **arguments: Any) -> np.ndarray:
    """Load back what a server has as the other process does."""
    assert (what, rows) == ("score", [0, 1, 2, 3, 4])
    of_keras_file(features={name: np.load(path) for name, path in features.items()}, **arguments)
    return np.eye(3)[(LABELS + 1) % 3]


@pytest.mark.usefixtures("own_imports")
def test_code_that_a_servers_model_names_is_not_imported_to_load_it_back(store: Path, monkeypatch) -> None:
    """To be scored again for a registration, or to be the champion again: by the store of another address that says of
    itself that it is not the project's own."""
    name, first = two_champions()
    imported = name_own_code(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite+pysqlite:///{store.absolute()}")
    monkeypatch.delenv("STRATAGEM_OWN_CODE", raising=False)
    assert not is_own_store()
    refused = f"{name}/1 = 'planted:build': a model of a server, MLFLOW_TRACKING_URI, may not name code to import"
    with pytest.raises(UserError, match=f"to version 1: it cannot be loaded back .*: {refused}"):
        roll_back(name, as_clean)
    tags = open_store().get_model_version(name, "1").tags
    with pytest.raises(UserError, match=refused):
        loaded_back.of_version(name, "1", tags, as_clean, first.prepared, [0, 1, 2, 3, 4])
    assert not imported.exists()
    monkeypatch.setenv("STRATAGEM_OWN_CODE", "planted")
    code = Path("planted.py").read_text()
    Path("planted.py").write_text(code + "changed = True\n")
    with pytest.raises(UserError, match=r"it cannot be loaded back .*: your code for it, planted, has changed"):
        roll_back(name, as_clean)
    Path("planted.py").write_text(code)
    assert roll_back(name, as_clean).loaded_back.endswith("outputs for 5 test rows equal those of its evaluation")
    assert imported.exists()
    assert aliases(name)["champion"] == "1"


def test_what_is_not_here_to_compare_with_is_told(store: Path) -> None:
    name, first = two_champions()
    Path(first.run.folder, "evaluation", "20.npz").unlink()
    told = "computed 5 test rows; there is nothing to compare them with: the outputs of its evaluation"
    assert told in roll_back(name, as_worse).loaded_back
    assert aliases(name)["champion"] == "1"


def test_without_data_to_compare_with_outputs_are_numbers_all_the_same(store: Path) -> None:
    name, first = two_champions()
    shutil.rmtree(first.run.folder)
    with pytest.raises(UserError, match="it cannot be loaded back in a clean process: its outputs are not finite"):
        roll_back(name, lambda *given, **more: np.array([[0.0, np.inf, 1.0]]))
    assert aliases(name)["champion"] == "2"


def test_a_version_that_is_deleted_while_it_is_loaded_back_is_one_message(store: Path) -> None:
    name, _ = two_champions()

    def delete(*given: object, **more: object) -> np.ndarray:
        open_store().delete_model_version(name, "1")
        return np.eye(3)[(LABELS + 1) % 3]

    with pytest.raises(
        UserError, match=f"'{name}' cannot be rolled back to version 1: .*Run `stratagem models rollback {name}` again"
    ):
        roll_back(name, delete)
    assert aliases(name)["champion"] == "2"


def test_a_champion_that_was_deleted(store: Path) -> None:
    name = Trained().register(right=WORSE).model_name
    Trained().register(right=3, force=True)
    third = Trained()
    third.register(right=BETTER, force=True)
    client = open_store()
    assert history(name) == "1, 2, 3"
    client.delete_model_version(name, "3")
    result = Trained().register(right=BETTER)
    assert (result.model_version, result.aliases) == ("4", ("challenger",))
    assert "version 3 was @champion, and was deleted in MLflow or lost the alias" in result.judgement.reason
    client.delete_model_version(name, "2")
    rolled = roll_back(name)
    assert (rolled.before, rolled.now, rolled.missing) == (None, "1", ("2", "3"))
    assert (aliases(name), history(name)) == ({"challenger": "4", "champion": "1"}, "1")
    client.delete_model_version(name, "1")
    with pytest.raises(UserError, match="version 1 no longer exists: `stratagem models register RUN --force` makes"):
        roll_back(name)


def test_a_model_that_somebody_else_registered(store: Path) -> None:
    name = Trained().register(right=WORSE).model_name
    client = open_store()
    foreign = client.create_model_version(name, source=Path("mlruns").absolute().as_uri())
    client.set_registered_model_alias(name, "champion", foreign.version)
    better = Trained()
    result = better.register(right=BETTER)
    assert result.aliases == ("challenger",)
    assert result.judgement.reason.startswith("version 2 is @champion, and its tags name no test rows")
    assert better.register(right=BETTER, force=True).aliases == ("challenger", "champion")
    assert history(name) == "1, 2, 3", "who had it by hand had it, too"


def other_rows(trained: Trained, images: np.ndarray) -> Trained:
    """The same run on data whose test rows are others."""
    test = trained.prepared.splits["test"]
    split = test.model_copy(update={"sha256": dict.fromkeys(test.features.values(), "0" * 64)})
    np.save(test.features["image"], images)
    trained.prepared = trained.prepared.model_copy(update={"splits": {"train": test, "test": split}})
    return trained


class Scorer:
    """Loads back what was evaluated with all right, and scores a champion as a model of which so many are."""

    def __init__(self, right: int) -> None:
        self.right, self.asked = right, []

    def __call__(self, what: str, features: dict[str, Path], rows: Any = None, **arguments: Any) -> np.ndarray:
        self.asked.append((what, arguments))
        right = self.right if what == "score" else BETTER
        outputs = np.eye(3)[(LABELS + (np.arange(5) >= right)) % 3]
        if what == "score":
            assert keras.saving.load_model(arguments["file"]).count_params() == 51
            assert np.load(features["image"]).shape == IMAGES.shape
        return outputs if rows is None else outputs[rows]


def test_a_champion_is_scored_again_where_the_test_rows_are_others(store: Path) -> None:
    name = Trained().register(right=WORSE).model_name
    scorer = Scorer(WORSE)
    result = other_rows(Trained(), IMAGES[::-1]).register(right=BETTER, apart=scorer)
    assert [what for what, _ in scorer.asked] == ["score", "load_back"]
    assert (result.judgement.promoted, result.judgement.scored_again) == (True, True)
    assert re.search(r"of version 1, scored again, is better by", result.judgement.reason)
    assert aliases(name) == {"challenger": "2", "champion": "2"}


def damage(name: str, trained: Trained) -> None:
    client = open_store()
    place = Path(client.get_model_version_download_uri(name, "1").removeprefix("file://"))
    (place / "data" / "model.keras").write_bytes(b"no model")


def take_other_classes(name: str, trained: Trained) -> None:
    target = records.Target.of_classes(("a", "b", "d"))
    trained.prepared = trained.prepared.model_copy(update={"target": target})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage, r"cannot be scored: .*/1: .*model\.keras is damaged or was changed"),
        (take_other_classes, "cannot be scored: its outputs mean a, b, c, but those of the data mean a, b, d"),
    ],
)
def test_a_champion_that_cannot_be_scored_again_keeps_the_alias(
    store: Path, change: Callable[[str, Trained], None], reason: str
) -> None:
    name = Trained().register(right=WORSE).model_name
    second = other_rows(Trained(), IMAGES)
    change(name, second)
    result = second.register(right=BETTER)
    assert result.aliases == ("challenger",)
    assert result.judgement.reason.startswith("version 1 is @champion, has no outputs for these test rows and")
    assert re.search(reason, result.judgement.reason)
    assert aliases(name)["champion"] == "1"


def test_a_champion_that_gives_what_no_model_of_these_data_does_keeps_the_alias(store: Path) -> None:
    name = Trained().register(right=WORSE).model_name
    infinite, as_evaluated = np.full((5, 3), np.inf), Scorer(BETTER)
    result = other_rows(Trained(), IMAGES).register(
        right=BETTER,
        apart=lambda what, *more, **named: infinite if what == "score" else as_evaluated(what, *more, **named),
    )
    assert "cannot be scored: its outputs are not finite numbers" in result.judgement.reason
    assert aliases(name)["champion"] == "1"


def test_an_evaluation_of_other_rows_than_there_are_now_is_done_again(store: Path) -> None:
    trained = Trained()
    before = trained.prepared
    evaluated = other_rows(trained, IMAGES).prepared
    trained.prepared = before
    result = trained.register(rows_of=evaluated)
    assert result.model_version is None
    again = f"`stratagem evaluate {trained.run.run_id}`, then `stratagem models register {trained.run.run_id}`"
    assert result.reason == f"its evaluation has no outputs for the current test rows of data/digits/prepared: {again}"


def fails(*given: object, **more: object) -> Any:
    raise StratagemError("ValueError: Unknown layer: 'Mine'")


@pytest.mark.parametrize(
    ("apart", "reason"),
    [
        (lambda *given, **more: np.eye(3)[LABELS] + 0.001, "its outputs differ from those of its evaluation by 0.00"),
        (fails, "it cannot be loaded back through MLflow in a clean process: ValueError: Unknown layer: 'Mine'"),
    ],
    ids=["a little", "error"],
)
def test_a_model_that_is_loaded_back_otherwise_is_no_version(store: Path, apart: Any, reason: str) -> None:
    name = Trained().register(right=WORSE).model_name
    result = Trained().register(right=BETTER, apart=apart)
    assert (result.model_version, result.aliases, result.judgement) == (None, (), None)
    assert re.search(reason, result.reason), result.reason
    assert aliases(name) == {"challenger": "1", "champion": "1"}
    assert len(open_store().search_model_versions()) == 1


def test_a_difference_of_rounding_is_none(store: Path) -> None:
    assert Trained().register(apart=lambda *given, **more: np.eye(3)[LABELS] + 1e-6).model_version == "1"


def test_while_another_process_registers_none_is_judged(store: Path, monkeypatch) -> None:
    name = Trained().register(right=WORSE).model_name
    monkeypatch.setattr(registry, "LOCK_SECONDS", 0.1)
    with FileLock("mlruns/.registry.lock"):
        for work in (lambda: Trained().register(right=BETTER), lambda: roll_back(name)):
            with pytest.raises(StratagemError, match=r"another process has registered a model in .* for over an hour"):
                work()
    assert aliases(name)["champion"] == "1"


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_command_loads_a_model_back_in_a_process_of_its_own(store: Path, run: Run) -> None:
    first = Trained()
    outputs = keras.saving.load_model(first.training.final_model).predict(IMAGES, verbose=0)
    name = first.register(outputs=outputs).model_name
    records.save(first.prepared, Path(first.prepared.folder, "manifest.json"))
    Trained().register(force=True)
    done = run(["stratagem", "models", "rollback", name, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "model_name": name, "before": "2", "now": "1", "missing": [],
        "loaded_back": "it was loaded, and its outputs for 5 test rows equal those of its evaluation",
    }  # fmt: skip
    Trained().register(force=True)
    damage(name, first)
    done = run(["stratagem", "models", "rollback", name, "--json"])
    assert done.returncode == 2, done.stderr
    assert f"'{name}' cannot be rolled back to version 1: it cannot be loaded back in a clean process: " in done.stderr
    assert aliases(name)["champion"] == "3"


@pytest.mark.slow
def test_a_process_that_is_killed_after_any_write_leaves_one_champion(store: Path, run: Run) -> None:
    """Really killed, each time: see the script, which gives the same commands again after each."""
    done = run(
        [sys.executable, CHECKOUT / "tests" / "tasks" / "killed_registrations.py"], env={"PYTHONPATH": str(CHECKOUT)}
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) > 15, "every write was the last one once"
