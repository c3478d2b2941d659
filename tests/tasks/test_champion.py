"""The alias `champion`: who gets it, who does not and why, and back again; on a real MLflow store."""

import json
import re
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import pytest
from filelock import FileLock

from tasks import records, register
from tasks.evaluation import slices
from tasks.runs import lineage
from tasks.serving import loaded_back
from tasks.serving.outputs import of_keras_file
from tasks.system import files
from tasks.system.errors import StratagemError, UserError
from tasks.tracking import registry
from tasks.tracking.champion import find_rollback, move_champion_back
from tasks.tracking.models import predict
from tasks.tracking.store import is_own_store, open_store, store_uri
from tests.tasks.killed_registrations import BETTER, WORSE
from tests.tasks.registering import IMAGES, LABELS, Trained, of_nothing, roll_back

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
    assert again.judgement.reason == "this model is @champion already"
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
        assert tags["gate"] == result.judgement.reason
    assert (aliases(name)["champion"], history(name)) == ("2", "1, 2")

    loaded = "it was loaded, and computed an example of no meaning; nothing was compared: "
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
    assert (what, list(features), rows) == ("load_back", ["image"], [0, 1, 2, 3, 4])
    assert keras.saving.load_model(Path(arguments["place"].removeprefix("file://"), "data", "model.keras"))
    return np.eye(3)[(LABELS + 1) % 3]


def test_a_model_is_loaded_back_before_it_is_the_champion_again(store: Path) -> None:
    name, _ = two_champions()
    said = "it was loaded, and gives what it gave when it was evaluated, compared on 5 test rows"
    assert roll_back(name, as_worse) == records.RolledBack(model_name=name, before="2", now="1", loaded_back=said)
    assert aliases(name)["champion"] == "1"


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("apart", "reason"),
    [
        (
            lambda *given, **more: np.eye(3)[LABELS],
            "loaded back in a clean process it gives other outputs than when it",
        ),
        (
            lambda *given, **more: fails(),
            "it cannot be loaded back in a clean process: ValueError: Unknown layer: 'Mine'",
        ),
    ],
    ids=["other", "error"],
)
def test_a_model_that_is_another_one_by_now_does_not_get_the_alias_back(store: Path, apart: Any, reason: str) -> None:
    name, _ = two_champions()
    with pytest.raises(UserError, match=f"'{name}' cannot be rolled back to version 1: ") as caught:
        roll_back(name, apart)
    assert re.search(reason, str(caught.value))
    assert "@champion stays at version 2. Delete version 1 in MLflow" in str(caught.value)
    assert (aliases(name)["champion"], history(name)) == ("2", "1, 2")
    assert "rolled_back" not in open_store().get_model_version(name, "2").tags


@pytest.mark.exhaustive
def test_of_a_servers_model_the_keras_file_alone_is_loaded_back(store: Path, monkeypatch) -> None:
    """What MLflow would load with it is code, which others may have written."""
    name, _ = two_champions()
    client = open_store()
    monkeypatch.setattr(register, "is_own_store", lambda: False)
    digest = client.get_model_version(name, "1").tags["keras_file_sha256"]
    client.delete_model_version_tag(name, "1", "keras_file_sha256")
    with pytest.raises(UserError, match=r"to version 1: it cannot be loaded .*: this project did not register it"):
        roll_back(name, no_apart)
    client.set_model_version_tag(name, "1", "keras_file_sha256", digest)
    with pytest.raises(UserError, match=r"it cannot be loaded .*: it gives outputs that are not numbers"):
        roll_back(name, lambda *given, **more: np.full((5, 3), np.nan))
    scorer = Scorer(WORSE)
    assert roll_back(name, scorer).loaded_back.endswith("compared on 5 test rows")
    assert [what for what, _ in scorer.asked] == ["score"]


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
        loaded_back.of_keras_file(name, "1", tags, as_clean, first.prepared, [0, 1, 2, 3, 4])
    assert not imported.exists()
    monkeypatch.setenv("STRATAGEM_OWN_CODE", "planted")
    assert roll_back(name, as_clean).loaded_back.endswith("compared on 5 test rows")
    assert imported.exists()
    assert aliases(name)["champion"] == "1"


def test_a_model_whose_data_are_not_here_computes_an_example(store: Path) -> None:
    first = Trained()
    name = first.register().model_name
    place = open_store().get_model_version_download_uri(name, "1")
    try:
        assert predict(place, store_uri(), {}, encoded=False).shape == (1, 3)
    finally:
        mlflow.set_tracking_uri(None)  # It stands in the environment, too.
    assert of_keras_file(first.training.final_model, {}).shape == (1, 3)


def lose_outputs(first: Trained) -> None:
    Path(first.run.folder, "evaluation", "20.npz").unlink()


def lose_run(first: Trained) -> None:
    shutil.rmtree(first.run.folder)


def have_other_rows(first: Trained) -> None:
    other_rows(first, IMAGES)
    test = first.prepared.splits["test"].model_copy(update={"sha256": {}, "labels": "other.npy"})
    changed = first.prepared.model_copy(update={"splits": {"train": test, "test": test}})
    records.save(changed, Path(first.prepared.folder, "manifest.json"))


def have_other_classes(first: Trained) -> None:
    target = records.Target.of_classes(("a", "b", "d"))
    records.save(first.prepared.model_copy(update={"target": target}), Path(first.prepared.folder, "manifest.json"))


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("lose", "apart", "told"),
    [
        (
            lose_outputs,
            as_worse,
            "computed 5 test rows; nothing was compared: what it gave when it was evaluated is not",
        ),
        (
            have_other_rows,
            as_worse,
            "computed 5 test rows; nothing was compared: data/digits/prepared has other test rows",
        ),
        (
            have_other_classes,
            of_nothing,
            "nothing was compared: data/digits/prepared has other columns, image sizes, voc",
        ),
        (lose_run, of_nothing, "nothing was compared: the run that it was made of is not here"),
    ],
)
def test_what_is_not_here_to_compare_with_is_told(
    store: Path, lose: Callable[[Trained], None], apart: Any, told: str
) -> None:
    name, first = two_champions()
    lose(first)
    assert told in roll_back(name, apart).loaded_back
    assert aliases(name)["champion"] == "1"


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("lose", [lose_run, have_other_classes])
def test_without_data_to_compare_with_outputs_are_numbers_all_the_same(
    store: Path, lose: Callable[[Trained], None]
) -> None:
    name, first = two_champions()
    lose(first)
    with pytest.raises(UserError, match="it cannot be loaded back in a clean process: it gives outputs that are no"):
        roll_back(name, lambda *given, **more: np.array([[0.0, np.inf, 1.0]]))
    assert aliases(name)["champion"] == "2"
    found = roll_back(name, lambda *given, **more: np.asarray([])).loaded_back  # As of a model without an example.
    assert found.startswith("it was loaded, and computed nothing; nothing was compared: ")


@pytest.mark.exhaustive
def test_a_champion_that_moved_since_a_rollback_looked_stays(store: Path) -> None:
    name, _ = two_champions()
    back = find_rollback(name)
    third = Trained().register(right=BETTER, force=True)
    assert third.aliases == ("challenger", "champion")
    with pytest.raises(StratagemError, match=f"@champion of '{name}' was moved meanwhile: it is at version 3 now"):
        move_champion_back(back)
    assert (aliases(name)["champion"], history(name)) == ("3", "1, 2, 3")


# The project's own store, and one that only says so.
STORES = (
    pytest.param("sqlite", id="own"),
    pytest.param("sqlite+pysqlite", id="other", marks=pytest.mark.slow),
)


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("address", STORES)
@pytest.mark.parametrize("what", ["version", "model"])
def test_what_is_deleted_while_it_is_loaded_back_leaves_the_champion_as_it_was(
    store: Path, monkeypatch, what: str, address: str
) -> None:
    name, _ = two_champions()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{address}:///{store.absolute()}")
    client = open_store()

    def delete(*given: object, **more: object) -> np.ndarray:
        client.delete_model_version(name, "1") if what == "version" else client.delete_registered_model(name)
        return np.eye(3)[(LABELS + 1) % 3]

    gone = "version 1" if what == "version" else "the model"
    with pytest.raises(UserError, match=f"'{name}' cannot be rolled back to version 1: {gone} was deleted meanwhile"):
        roll_back(name, delete)
    if what == "version":
        assert (aliases(name)["champion"], history(name)) == ("2", "1, 2")
        assert "rolled_back" not in client.get_model_version(name, "2").tags


# The last look is over: what is deleted right before which of the requests that move the alias, what is said of it, and
# which version is the champion then.
MOMENTS = {
    "the version, before the champion is marked": ("1", "set_model_version_tag", "version 1 was deleted", "2"),
    "the version, before the alias moves": ("1", "set_registered_model_alias", "version 1 was deleted", "2"),
    "the champion, before it is marked": ("2", "set_model_version_tag", "version 2, which was @champion, was", None),
    "the model, before its history is written": (None, "set_registered_model_tag", "the model was deleted", None),
    "the model, before the alias moves": (None, "set_registered_model_alias", "the model was deleted", None),
}


@pytest.mark.in_ci(1)
@pytest.mark.parametrize(("deleted", "request_", "told", "left"), MOMENTS.values(), ids=MOMENTS.keys())
@pytest.mark.parametrize("address", STORES)
def test_what_is_deleted_after_the_last_look_leaves_one_champion_or_is_told(
    store: Path, monkeypatch, deleted: str | None, request_: str, told: str, left: str | None, address: str
) -> None:
    name, _ = two_champions()
    back = find_rollback(name)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{address}:///{store.absolute()}")
    client, as_it_is = open_store(), getattr(mlflow.MlflowClient, request_)

    def somebody_is_quicker(self: mlflow.MlflowClient, *given: object, **more: object) -> None:
        monkeypatch.setattr(mlflow.MlflowClient, request_, as_it_is)
        client.delete_registered_model(name) if deleted is None else client.delete_model_version(name, deleted)
        as_it_is(self, *given, **more)

    monkeypatch.setattr(mlflow.MlflowClient, request_, somebody_is_quicker)
    with pytest.raises(StratagemError, match=f"'{name}' cannot be rolled back to version 1: {told}") as caught:
        move_champion_back(back)
    assert "\n" not in str(caught.value)
    if deleted is None:
        assert client.search_registered_models() == []
        return
    assert aliases(name).get("champion") == left
    if left is not None:
        assert "rolled_back" not in client.get_model_version(name, left).tags
        assert Trained().register(right=BETTER).judgement.against == left


@pytest.mark.exhaustive
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
    with pytest.raises(UserError, match="no version is @champion, and version 1 is no longer there"):
        roll_back(name)


def test_a_model_that_somebody_else_registered(store: Path) -> None:
    name = Trained().register(right=WORSE).model_name
    client = open_store()
    foreign = client.create_model_version(name, source=Path("mlruns").absolute().as_uri())
    client.set_registered_model_alias(name, "champion", foreign.version)
    better = Trained()
    result = better.register(right=BETTER)
    assert result.aliases == ("challenger",)
    assert result.judgement.reason.startswith("version 2 is @champion, and this project did not register it")
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


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(("right", "promoted"), [(WORSE, True), (BETTER, False)])
def test_a_champion_is_scored_again_where_the_test_rows_are_others(store: Path, right: int, promoted: bool) -> None:
    name = Trained().register(right=WORSE).model_name
    scorer = Scorer(right)
    result = other_rows(Trained(), IMAGES[::-1]).register(right=BETTER, apart=scorer)
    assert [what for what, _ in scorer.asked] == ["score", "load_back"]
    assert (result.judgement.promoted, result.judgement.scored_again) == (promoted, True)
    assert re.search(r"of version 1, scored again, (is better|differs) by", result.judgement.reason)
    assert aliases(name) == {"challenger": "2", "champion": "2" if promoted else "1"}


@pytest.mark.exhaustive
def test_a_champion_whose_outputs_are_gone_is_scored_again(store: Path) -> None:
    first = Trained()
    first.register(right=BETTER)
    Path(first.run.folder, "evaluation", "20.npz").write_bytes(b"")
    assert Trained().register(apart=Scorer(WORSE)).judgement.promoted


def damage(name: str, trained: Trained) -> None:
    client = open_store()
    place = Path(client.get_model_version_download_uri(name, "1").removeprefix("file://"))
    (place / "data" / "model.keras").write_bytes(b"no model")


def write_file(name: str, write: Callable[[Path], object], **tags: str) -> None:
    """Have version 1 another .keras file, with its own sha256."""
    client = open_store()
    file = Path(client.get_model_version_download_uri(name, "1").removeprefix("file://"), "data", "model.keras")
    write(file)
    for key, text in {"keras_file_sha256": files.digest(file), **tags}.items():
        client.set_model_version_tag(name, "1", key, text)


def be_no_archive(name: str, trained: Trained) -> None:
    write_file(name, lambda file: file.write_bytes(b"no model"), model="mine:build")


def be_without_layers(name: str, trained: Trained) -> None:
    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("weights", "")

    write_file(name, write, model="mine:build")


def be_large(name: str, trained: Trained) -> None:
    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "a") as archive:
            archive.writestr("more", b" ")
            archive.infolist()[-1].file_size = 2**50

    write_file(name, write)


def take_other_classes(name: str, trained: Trained) -> None:
    target = records.Target.of_classes(("a", "b", "d"))
    trained.prepared = trained.prepared.model_copy(update={"target": target})


def of_own_code(name: str, trained: Trained) -> None:
    open_store().set_model_version_tag(name, "1", "model", "mine:build")
    Path("mine.py").write_text("changed = True")


@pytest.mark.in_ci(0, 4)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage, r"it cannot be scored again: its \.keras file in MLflow is damaged\."),
        (be_no_archive, r"it cannot be scored again: its \.keras file in MLflow is not an archive"),
        (be_without_layers, r"it cannot be scored again: its \.keras file in MLflow cannot be read \(.*config\.json"),
        (be_large, r"it cannot be scored again: .*/1: .*model\.keras unpacks to 1,125,899,[\d,]+ bytes, and"),
        (take_other_classes, "it cannot be given the present ones: image size, columns, vocabularies or classes are"),
        (of_own_code, "it cannot be scored again: your code of it, mine, is another one since"),
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
    assert result.judgement.reason.startswith("version 1 is @champion, and was tested on other rows or its outputs are")
    assert re.search(reason, result.judgement.reason)
    assert aliases(name)["champion"] == "1"


@pytest.mark.in_ci(0)
@pytest.mark.parametrize(
    ("given", "reason"),
    [(np.full((5, 3), np.inf), "outputs that are not numbers"), (np.zeros((5, 2)), r"outputs of shape \(5, 2\)")],
    ids=["no numbers", "another shape"],
)
def test_a_champion_that_gives_what_no_model_of_these_data_does_keeps_the_alias(
    store: Path, given: np.ndarray, reason: str
) -> None:
    name = Trained().register(right=WORSE).model_name
    as_evaluated = Scorer(BETTER)
    result = other_rows(Trained(), IMAGES).register(
        right=BETTER,
        apart=lambda what, *more, **named: given if what == "score" else as_evaluated(what, *more, **named),
    )
    assert re.search(f"it cannot be scored again: it gives {reason}", result.judgement.reason)
    assert aliases(name)["champion"] == "1"


def test_an_evaluation_of_other_rows_than_there_are_now_is_done_again(store: Path) -> None:
    trained = Trained()
    before = trained.prepared
    evaluated = other_rows(trained, IMAGES).prepared
    trained.prepared = before
    result = trained.register(rows_of=evaluated)
    assert result.model_version is None
    again = f"`stratagem evaluate --run {trained.run.run_id}`, then `stratagem register --run {trained.run.run_id}`"
    assert (
        result.reason == f"its evaluation has no outputs for the test rows that data/digits/prepared has now: {again}"
    )


def fails(*given: object, **more: object) -> Any:
    raise StratagemError("ValueError: Unknown layer: 'Mine'")


@pytest.mark.in_ci(1, 4)
@pytest.mark.parametrize(
    ("apart", "reason"),
    [
        (lambda *given, **more: np.eye(3)[(LABELS + 1) % 3], "it gives other outputs than when it was evaluated: 2."),
        (lambda *given, **more: np.eye(3)[LABELS] + 0.001, "it gives other outputs than when it was evaluated: 0.00"),
        (lambda *given, **more: np.full((5, 3), np.nan), "it gives outputs that are not numbers for 5 of 5 test rows"),
        (lambda *given, **more: np.zeros((5, 2)), r"it gives outputs of shape \(5, 2\), not \(5, 3\) as evaluated"),
        (fails, "it cannot be loaded back through MLflow in a clean process: ValueError: Unknown layer: 'Mine'"),
    ],
    ids=["other", "a little", "no numbers", "shape", "error"],
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


@pytest.mark.exhaustive
@pytest.mark.parametrize("address", STORES)
def test_while_another_process_registers_none_is_judged(store: Path, monkeypatch, address: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"{address}:///{store.absolute()}")
    name = Trained().register(right=WORSE).model_name
    monkeypatch.setattr(registry, "LOCK_SECONDS", 0.1)
    with FileLock("mlruns/.registry.lock"):
        for work in (lambda: Trained().register(right=BETTER), lambda: roll_back(name)):
            with pytest.raises(StratagemError, match=r"another process has registered a model in .* for over an hour"):
                work()
    assert aliases(name)["champion"] == "1"


@pytest.mark.slow
def test_the_command_loads_a_model_back_in_a_process_of_its_own(store: Path, run: Run) -> None:
    first = Trained()
    outputs = keras.saving.load_model(first.training.final_model).predict(IMAGES, verbose=0)
    name = first.register(outputs=outputs).model_name
    records.save(first.prepared, Path(first.prepared.folder, "manifest.json"))
    Trained().register(force=True)
    done = run(["stratagem", "rollback", name, "--json"])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "model_name": name, "before": "2", "now": "1", "missing": [],
        "loaded_back": "it was loaded, and gives what it gave when it was evaluated, compared on 5 test rows",
    }  # fmt: skip
    Trained().register(force=True)
    damage(name, first)
    done = run(["stratagem", "rollback", name, "--json"])
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
