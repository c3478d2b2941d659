import contextlib
import shutil
import warnings
from pathlib import Path

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks import config
from tasks.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
PARAMS = yaml.safe_load((ROOT / "params.yaml").read_text())


@pytest.fixture
def root(tmp_path):
    """A folder with the project's params.yaml and an empty recipes/, for tests that write into either."""
    shutil.copy(ROOT / "params.yaml", tmp_path)
    (tmp_path / "recipes").mkdir()
    return tmp_path


def write_params(root, **sections):
    """Overwrite keys of the folder's params.yaml, without the rules of overlays."""
    values = yaml.safe_load((root / "params.yaml").read_text())
    for section, keys in sections.items():
        values[section] |= keys
    (root / "params.yaml").write_text(yaml.safe_dump(values))


def write_recipe(root, text, name="worked"):
    (root / "recipes" / f"{name}.yaml").write_text(text)
    return name


def message_of(overrides, recipe=None, root=ROOT):
    with pytest.raises(UserError) as caught:
        config.load(recipe, overrides, root)
    assert caught.value.exit_code == 2
    message = str(caught.value)
    assert "\n" not in message
    return message


# Each row: what the user gives, and what the one message must say: key, value, what is allowed or what to do.
BAD = [
    # unknown names, with the nearest match
    (["train.epohcs=3"], ["'train.epohcs'", "did you mean 'train.epochs'?", "train.seed"]),
    (["modle.name=mlp"], ["unknown section 'modle'", "did you mean 'model'?", "dataset"]),
    (["input.augmentation.flipp=true"], ["did you mean 'input.augmentation.flip'?", "crop_padding"]),
    (
        ["train.early_stopping.patience=2"],
        ["'train.early_stopping.patience'", "'train.early_stopping.patience_epochs'?"],
    ),
    (["register_.enabled=false"], ["unknown section 'register_'", "did you mean 'register'?"]),
    (["strategy.kind=mirored"], ["'mirored'", "did you mean 'mirrored'?", "one_device"]),
    (["strategy.kind=null"], ["strategy.kind", "mirrored, one_device"]),
    (["strategy.kind=[mirrored]"], ["strategy.kind", "mirrored, one_device"]),
    (["optimizer.kind=adamm"], ["'adamm'", "did you mean 'adam'?", "sgd"]),
    (["schedule.kind=cosin"], ["'cosin'", "did you mean 'cosine'?", "piecewise"]),
    (["model.name=convnt"], ["'convnt'", "did you mean 'convnet'?", "resnet", "module:function"]),
    (["train.loop=fitt"], ["train.loop", "'fitt'", "'fit'"]),
    (["train.dtype_policy=float16"], ["train.dtype_policy", "'float16'", "mixed_bfloat16"]),
    (["checkpoint.monitor=val_loss"], ["checkpoint.monitor", "'val_loss'", "validation/loss"]),
    # keys of another kind
    (["strategy.kind=mirrored", "strategy.device=cpu"], ["'strategy.device'", "did you mean 'strategy.devices'?"]),
    (["strategy.device=cpu", "strategy.kind=mirrored"], ["'strategy.device'", "did you mean 'strategy.devices'?"]),
    (["optimizer.kind=adam", "optimizer.momentum=0.9"], ["'optimizer.momentum'", "optimizer.global_clipnorm"]),
    # wrong type
    (["train.epochs=many"], ["train.epochs", "'many'", "valid integer", "--set train.epochs=VALUE"]),
    (["train.epochs=1.5"], ["train.epochs", "1.5", "integer"]),
    (["train.epochs="], ["train.epochs", "None", "integer"]),
    (["train.epochs=true"], ["train.epochs = true"]),
    (["input.validation=true"], ["input.validation = true"]),
    (["input.shuffle=maybe"], ["input.shuffle", "'maybe'", "boolean"]),
    (["model.name=3"], ["model.name", "3", "string", "module:function"]),
    (["model.options=3"], ["model.options", "3", "dictionary"]),
    (["dataset.image_size=28"], ["dataset.image_size", "28", "Height and width"]),
    (["dataset.image_size=[28]"], ["dataset.image_size = [28]", "Height and width"]),
    (["dataset.image_size=[28, 0]"], ["dataset.image_size = [28, 0]", "greater than 0"]),
    (["dataset.image_size=[28, 28, 1]"], ["dataset.image_size = [28, 28, 1]", "at most 2"]),
    (["dataset.name.x=3"], ["dataset.name", "string"]),
    (["train=3"], ["train = 3", "section", "train.epochs"]),
    (["train.early_stopping=3"], ["train.early_stopping = 3", "section", "train.early_stopping.monitor"]),
    (["strategy=mirrored"], ["strategy = 'mirrored'", "section", "strategy.kind"]),
    (["strategy=null"], ["strategy = None", "section", "strategy.kind"]),
    # out of bounds
    (["train.epochs=0"], ["train.epochs = 0", "greater than 0", "--set train.epochs=VALUE"]),
    (["train.per_replica_batch_size=-32"], ["train.per_replica_batch_size = -32", "greater than 0"]),
    (["train.global_batch_size=-64"], ["train.global_batch_size = -64", "greater than 0"]),
    (["train.steps_per_execution=0"], ["train.steps_per_execution = 0", "greater than 0"]),
    (["train.seed=-1"], ["train.seed = -1", "greater than or equal to 0"]),
    (["train.seed=2147483648"], ["train.seed = 2147483648", "less than 2147483648"]),
    (["schedule.learning_rate=0"], ["schedule.learning_rate = 0", "greater than 0"]),
    (["schedule.learning_rate=.inf"], ["schedule.learning_rate = inf", "finite"]),
    (["register.minimum=.nan"], ["register.minimum = nan", "finite"]),
    (["input.validation=1.5"], ["input.validation = 1.5", "less than 1", "an exact number"]),
    (["input.validation=0"], ["input.validation = 0", "greater than 0"]),
    (["input.prefetch=-1"], ["input.prefetch = -1", "'auto'"]),
    (["checkpoint.keep=0"], ["checkpoint.keep = 0", "greater than 0"]),
    (["evaluate.checkpoint=newest"], ["evaluate.checkpoint = 'newest'", "'latest' or 'best'"]),
    (["evaluate.checkpoint=0"], ["evaluate.checkpoint = 0", "'latest' or 'best'"]),
    (["dataset.name=../mnist"], ["dataset.name = '../mnist'", "pattern"]),
    (["strategy.device=tpu"], ["strategy.device = 'tpu'", "`gpu:1`"]),
    (["register.alias=9lives"], ["register.alias = '9lives'", "pattern"]),
    # values that do not go together
    (["train.global_batch_size=64", "train.per_replica_batch_size=32"], ["per_replica_batch_size=32", "exactly one"]),
    (["train.global_batch_size=null", "train.per_replica_batch_size=null"], ["exactly one"]),
    (["schedule.kind=piecewise", "schedule.boundaries_epochs=[3]"], ["1 boundaries_epochs", "2 learning_rates, got 3"]),
    (["schedule.kind=piecewise", "schedule.boundaries_epochs=[7, 3]"], ["schedule.boundaries_epochs = [7, 3]", "rise"]),
    (["schedule.kind=piecewise", "schedule.learning_rates=[1, 0, 1]"], ["schedule.learning_rates = [1, 0, 1]"]),
    (
        ["input.validation=null", "checkpoint.monitor=validation/loss"],
        ["checkpoint.monitor = 'validation/loss'", "set checkpoint.monitor=train/loss"],
    ),
    (
        ["input.validation=null", "checkpoint.monitor=train/loss", "train.early_stopping.monitor=validation/accuracy"],
        ["train.early_stopping.monitor = 'validation/accuracy'", "train/accuracy"],
    ),
    # not settings at all
    (["train.epochs"], ["--set train.epochs", "section.key=value"]),
    (["=3"], ["--set =3", "section.key=value"]),
    (["train.epochs=[1"], ["--set train.epochs=[1", "not YAML"]),
    (["model.options.x=!!python/object/apply:os.getcwd []"], ["not YAML", "python/object"]),
]


@pytest.mark.parametrize(("overrides", "said"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_a_wrong_setting_gives_one_message(overrides, said):
    message = message_of(overrides)
    for text in said:
        assert text in message


BAD_FILES = [
    ("", ["NoneType", "sections"]),
    ("- train\n", ["list", "sections"]),
    ("train: [\n", ["not valid YAML"]),
    ("3: x\n", ["unknown section '3'", "train"]),
    ("train: {3: x}\n", ["unknown key 'train.3'", "train.epochs"]),
    ("strategy:\n  kind:\n", ["strategy.kind", "mirrored"]),
    ("train: {global_batch_size: 64, per_replica_batch_size: 32}\n", ["exactly one"]),
]


@pytest.mark.parametrize(("text", "said"), BAD_FILES)
def test_a_wrong_recipe_gives_one_message(root, text, said):
    message = message_of([], write_recipe(root, text), root)
    for words in said:
        assert words in message


def test_a_recipe_that_is_not_text(root):
    (root / "recipes" / "binary.yaml").write_bytes(b"\xff\xfe\x00train")
    assert "binary.yaml: cannot be read" in message_of([], "binary", root)


def test_an_unknown_recipe_names_the_nearest(root):
    write_recipe(root, "train: {epochs: 1}\n", "mnist")
    write_recipe(root, "train: {epochs: 1}\n", "cifar10")
    message = message_of([], "mnits", root)
    assert "unknown recipe 'mnits': did you mean 'mnist'? Allowed: cifar10, mnist" in message
    gone = str(root / "gone.yaml")
    assert f"unknown recipe '{gone}'" in message_of([], gone, root)


@pytest.mark.parametrize("key", ["train.epochs", "dataset.name", "schedule.learning_rate", "tracking"])
def test_a_key_that_params_yaml_lacks_is_named(root, key):
    section, _, name = key.partition(".")
    values = yaml.safe_load((root / "params.yaml").read_text())
    if name:
        del values[section][name]
    else:
        del values[section]
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    assert message_of([], root=root).startswith(f"{key} is missing")


def test_a_section_without_its_kind(root):
    write_params(root)
    values = yaml.safe_load((root / "params.yaml").read_text())
    del values["strategy"]["kind"]
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    message = message_of([], root=root)
    assert "strategy.kind is missing" in message
    assert "mirrored" in message


def test_no_params_yaml(tmp_path):
    assert "params.yaml: cannot be read" in message_of([], root=tmp_path)


KEYS = [key for key, _ in config._fields(config.Settings)]
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("mirrored")
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@hypothesis.settings(max_examples=400, deadline=None, derandomize=True, database=None)
@hypothesis.given(st.lists(st.tuples(st.sampled_from(KEYS) | st.text("abc.=", max_size=8), VALUES), max_size=4))
def test_whatever_is_given_the_answer_is_settings_or_one_message(given):
    texts = [
        f"{key}={yaml.safe_dump(value, default_flow_style=True).removesuffix('...' + chr(10))}" for key, value in given
    ]
    with contextlib.suppress(UserError):
        config.load(None, texts, ROOT)


def test_order_of_the_layers(root):
    write_params(root, train={"epochs": 1, "seed": 1}, checkpoint={"keep": 1})
    recipe = write_recipe(root, "train: {epochs: 2, seed: 2}\n")
    settings = config.load(recipe, ["train.epochs=3"], root)
    assert (settings.train.epochs, settings.train.seed, settings.checkpoint.keep) == (3, 2, 1)
    by_path = config.load(str(root / "recipes" / "worked.yaml"), ["train.epochs=3"], root)
    assert by_path == settings
    assert config.load(None, [], root).train.epochs == 1
    assert config.load(None, ["train.epochs=5", "train.epochs=6"], root).train.epochs == 6


def test_recipes_are_the_files_of_the_folder(root):
    write_recipe(root, "{}\n", "b")
    write_recipe(root, "{}\n", "a")
    assert list(config.recipes(root)) == ["a", "b"]


@pytest.mark.parametrize("recipe", config.recipes(ROOT))
def test_every_recipe_of_the_project_loads(recipe):
    text = (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    overlay = yaml.safe_load(text)
    assert text.startswith("#"), "the first lines say command, time and expected result"
    loaded = config.load(recipe, root=ROOT).to_json()
    for section, keys in overlay.items():
        for key, value in keys.items():
            assert loaded[section][key] == value or isinstance(value, dict)


# Each row: params.yaml's section, what lies over it, and the section that comes out.
KINDS = [
    ("optimizer", {"kind": "adam", "global_clipnorm": 1.0}, ["optimizer.kind=sgd", "optimizer.momentum=0.9"],
     {"kind": "sgd", "global_clipnorm": 1.0, "momentum": 0.9, "nesterov": False}),
    ("schedule", {"kind": "constant", "learning_rate": 0.01}, ["schedule.kind=cosine"],
     {"kind": "cosine", "learning_rate": 0.01, "warmup_epochs": 1.0, "final_learning_rate": 0.0}),
    ("schedule", {"kind": "constant", "learning_rate": 0.01}, ["schedule.kind=piecewise"],
     {"kind": "piecewise", "boundaries_epochs": [3, 7], "learning_rates": [1e-3, 1e-4, 1e-5]}),
    ("strategy", {"kind": "one_device", "device": "cpu"}, ["strategy.devices=2", "strategy.kind=mirrored"],
     {"kind": "mirrored", "devices": 2}),
    ("strategy", {"kind": "one_device", "device": "cpu"}, ["strategy.kind=one_device"],
     {"kind": "one_device", "device": "cpu"}),
    ("model", {"name": "mlp", "options": {"units": [8]}}, ["model.name=convnet"],
     {"name": "convnet", "options": {}}),
    ("model", {"name": "mlp", "options": {"units": [8]}}, ["model.name=convnet", "model.options.dropout=0.5"],
     {"name": "convnet", "options": {"dropout": 0.5}}),
    ("model", {"name": "mlp", "options": {"units": [8]}}, ["model.options.dropout=0.5"],
     {"name": "mlp", "options": {"units": [8], "dropout": 0.5}}),
]  # fmt: skip


@pytest.mark.parametrize(("section", "before", "overrides", "after"), KINDS)
def test_a_change_of_kind_keeps_what_the_new_kind_knows(root, section, before, overrides, after):
    values = yaml.safe_load((root / "params.yaml").read_text()) | {section: before}
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    assert config.load(None, overrides, root).to_json()[section] == after


# Each row: per-replica and global size in params.yaml, the same in the recipe, --set, and what comes out.
BATCHES = [
    ((32, None), "", [], (32, None)),
    ((32, None), "global_batch_size: 64", [], (None, 64)),
    ((None, 64), "per_replica_batch_size: 16", [], (16, None)),
    ((32, None), "global_batch_size: 64", ["train.per_replica_batch_size=8"], (8, None)),
    ((32, None), "global_batch_size: 64, per_replica_batch_size: null", [], (None, 64)),
]


@pytest.mark.parametrize(("params", "recipe", "overrides", "expected"), BATCHES)
def test_one_batch_size_takes_the_place_of_the_other(root, params, recipe, overrides, expected):
    write_params(root, train=dict(zip(config.BATCH_SIZES, params, strict=True)))
    train = config.load(write_recipe(root, f"train: {{{recipe}}}\n"), overrides, root).train
    assert (train.per_replica_batch_size, train.global_batch_size) == expected


def changed(section, path):
    """Return a copy of frozen settings in which one key, and nothing else, holds another value."""
    name, *rest = path
    field = "register_" if name == "register" else name
    if isinstance(section, dict):
        return section | {name: "something else"}
    value = changed(getattr(section, field), rest) if rest else "something else"
    return section.model_copy(update={field: value})


def test_the_digest_ignores_where_archives_lie_and_where_runs_are_tracked_and_nothing_else():
    settings = config.load(None, ["train.early_stopping={}", "dataset.downloads=/archives"], ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic: "something else" is not of the key's type
        ignored = {key for key in settings.flat() if changed(settings, key.split(".")).digest() == settings.digest()}
    assert ignored == {"dataset.downloads", "tracking.experiment", "tracking.system_metrics"}


def test_settings_survive_json_and_the_spelling_of_set():
    settings = config.load(None, ["schedule.kind=piecewise", "dataset.downloads=/archives"], ROOT)
    assert config.parse(settings.to_json()) == settings
    flat = settings.flat()
    assert flat["register.alias"] == settings.register_.alias
    assert flat["dataset.downloads"] == "/archives"
    again = config.load(
        None, [f"{key}={yaml.safe_dump(value, default_flow_style=True)}" for key, value in flat.items()], ROOT
    )
    assert again.digest() == settings.digest()


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        config.load(root=ROOT).train.epochs = 3


def test_a_deployment_refuses_what_is_out_of_bounds():
    overrides = config.overrides_model()
    schema = overrides.model_json_schema()
    assert schema["additionalProperties"] is False
    assert {"exclusiveMinimum": 0, "type": "integer"} in schema["properties"]["train.epochs"]["anyOf"]
    kinds = {choice.get("const") for choice in schema["properties"]["strategy.kind"]["anyOf"]}
    assert {"one_device", "mirrored"} <= kinds
    for key in config.load(root=ROOT).flat():
        assert key in schema["properties"] or key.startswith("model.options.")  # given as one dictionary
    for bad in (
        {"train.epochs": 0},
        {"train.epohcs": 3},
        {"strategy.kind": "mirored"},
        {"train.per_replica_batch_size": -1},
    ):
        with pytest.raises(ValidationError):
            overrides.model_validate(bad)
    good = overrides.model_validate({"train.epochs": 3, "strategy.devices": 2})
    assert good.model_dump(by_alias=True, exclude_unset=True) == {"train.epochs": 3, "strategy.devices": 2}


def test_the_project_is_found_from_inside_and_from_outside(project, tmp_path, monkeypatch):
    inside = project / "data" / "deep"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert config.project_root() == project
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert config.project_root() == ROOT


def test_no_project_anywhere(project, tmp_path, run):
    installed, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    shutil.copytree(project / "tasks", installed / "tasks")
    elsewhere.mkdir()
    code = "from tasks import config; config.project_root()"
    result = run(["python", "-c", code], cwd=elsewhere, env={"PYTHONPATH": str(installed)})
    assert f"UserError: no project here: neither {elsewhere} nor a folder above it" in result.stderr


def test_names_are_the_files_of_the_folder():
    names = config.names_of("models")
    assert names == sorted(names)
    assert {"convnet", "convnet2", "mlp", "resnet"} <= set(names)
    assert "__init__" not in names


def test_settings_and_records_load_no_framework(run):
    code = "import sys, tasks.config, tasks.records; print(*{name.partition('.')[0] for name in sys.modules})"
    result = run(["python", "-c", code])
    assert result.returncode == 0, result.stderr
    heavy = {"tensorflow", "keras", "jax", "numpy", "mlflow", "prefect", "dvc", "tensorflow_datasets", "rich", "typer"}
    assert heavy.isdisjoint(result.stdout.split())
