import re
import shutil
import warnings
from pathlib import Path

import pytest
import yaml
from prefect.utilities.schema_tools.validation import validate

from tasks import config
from tasks.config.schema import asks_for
from tasks.system.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


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
    (["optimizer.learning_rate=0.1"], ["did you mean 'schedule.learning_rate'?", "optimizer.global_clipnorm"]),
    (["strategy.devices=2"], ["unknown key 'strategy.devices'", "Allowed: strategy.device, strategy.kind; "
     "strategy.kind=mirrored or multi_worker or data_parallel or model_parallel has it: set that kind too"]),
    (["train.epohcs=3"], ["'train.epohcs'", "did you mean 'train.epochs'?", "train.seed"]),
    (["input.augmentation.flipp=true"], ["did you mean 'input.augmentation.flip'?", "crop_padding"]),
    (["register_.enabled=false"], ["unknown section 'register_'", "did you mean 'register'?"]),
    (["strategy.kind=mirored"], ["'mirored'", "did you mean 'mirrored'?", "one_device"]),
    (["strategy.kind=null"], ["strategy.kind", "mirrored, model_parallel, multi_worker, one_device"]),
    (["model.name=convnt"], ["'convnt'", "did you mean 'convnet'?", "resnet", "module:function"]),
    # keys of another kind
    (["strategy.kind=mirrored", "strategy.device=cpu"], ["'strategy.device'", "did you mean 'strategy.devices'?"]),
    (["optimizer.kind=adam", "optimizer.momentum=0.9"], ["'optimizer.momentum'", "optimizer.global_clipnorm"]),
    # wrong type
    (["train.epochs=many"], ["train.epochs", "'many'", "valid integer", "--set train.epochs=VALUE"]),
    (["train.epochs=true"], ["train.epochs = true"]),
    (["model.name=3"], ["model.name", "3", "string", "module:function"]),
    (["dataset.image_size=28"], ["dataset.image_size", "28", "Height and width"]),
    (["dataset.image_size=[28, 0]"], ["dataset.image_size = [28, 0]", "greater than 0"]),
    (["dataset.name.x=3"], ["dataset.name", "string"]),
    (["train=3"], ["train = 3", "section", "train.epochs"]),
    (["strategy=mirrored"], ["strategy = 'mirrored'", "section", "strategy.kind"]),
    # out of bounds
    (["train.epochs=0"], ["train.epochs = 0", "greater than 0", "--set train.epochs=VALUE"]),
    (["schedule.learning_rate=.inf"], ["schedule.learning_rate = inf", "finite"]),
    (["input.validation=1.5"], ["input.validation = 1.5", "less than 1", "a fraction or a number"]),
    *(
        ([f"checkpoint.remote={bad}"], ["checkpoint.remote", "write s3://BUCKET/FOLDER", "from the environment"])
        for bad in (
            "ftp://host/x", "bucket/x", "s3:/b", "s3://", "s3:///b", "file://x", "file:///", "s3://b/../x",
            "simplecache::s3://b", "s3://b/x?key=1", "memory://x", "abfs://c@account/x", "s3://b/*",
        )
    ),
    (["checkpoint.remote=s3://key:sesame-sesame@b/x"], ["checkpoint.remote seems to hold a password"]),
    (["evaluate.checkpoint=newest"], ["evaluate.checkpoint = 'newest'", "'latest' or 'best'"]),
    (["dataset.name=../mnist"], ["dataset.name = '../mnist'", "write lowercase letters"]),
    (["dataset.name=mnist/.."], ["dataset.name = 'mnist/..'", "may follow", "NAME/CONFIG"]),
    (["strategy.device=tpu"], ["strategy.device = 'tpu'", "`gpu:1`"]),
    (["register.metric=test/accurcy"], ["= 'test/accurcy'", "or test/ and top_K_accuracy with any K, or your own mod"]),
    (["train.metrics=[accurcy]"], ["train.metrics = ['accurcy']", "', or top_K_accuracy with any K, or your own mod"]),
    (
        ["checkpoint.monitor=accuracy"],
        ["checkpoint.monitor = 'accuracy'", "or train/ or validation/ and top_K_accuracy with any K, or"],
    ),
    *(
        ([f"register.model_name={bad}"], [f"register.model_name = '{bad}': write letters, digits, '_', '-' and '.',"])
        for bad in (".", "..", "..a", "a/b")
    ),
    (["register.alias=9lives"], ["register.alias = '9lives'", "beginning with a lowercase letter"]),
    (["register.alias=latest"], ["register.alias: MLflow reserves 'latest'", "--set register.alias="]),
    (["register.alias=champion"], ["register.alias: Stratagem moves 'champion' itself", "such as challenger"]),
    (["register.confidence=1"], ["register.confidence = 1", "less than 1", "Required confidence"]),
    (["register.floors={3: 80}"], ["register.floors = {'3': 80}", "less than or equal to 1", "recall"]),
    (["register.ceilings={'age: 1': -1}"], ["register.ceilings = {'age: 1': -1}", "greater than or equal to 0"]),
    # values that do not go together
    (["train.global_batch_size=64", "train.per_replica_batch_size=32"], ["per_replica_batch_size=32", "exactly one"]),
    (["train.global_batch_size=null", "train.per_replica_batch_size=null"], ["exactly one"]),
    (["schedule.kind=piecewise", "schedule.boundaries_epochs=[3]"], ["1 boundaries_epochs", "2 learning_rates, got 3"]),
    (["schedule.kind=piecewise", "schedule.boundaries_epochs=[7, 3]"], ["schedule.boundaries_epochs = [7, 3]", "rise"]),
    (
        ["input.validation=null", "checkpoint.monitor=validation/loss"],
        ["checkpoint.monitor = 'validation/loss'", "set checkpoint.monitor=train/loss"],
    ),
    (
        ["input.validation=null", "checkpoint.monitor=train/loss", "train.early_stopping.monitor=validation/accuracy"],
        ["train.early_stopping.monitor = 'validation/accuracy'", "train/accuracy"],
    ),
    # what a strategy cannot do
    (["strategy.kind=parameter_server"],
     ["train.loop = 'fit'", "works only with custom", "set train.loop=custom",
      "one_device, mirrored, multi_worker, tpu"]),
    (["strategy.kind=mirrored", "train.jit_compile=true"],
     ["train.jit_compile = true", "strategy.kind=mirrored", "XLA compiles a step", "set train.jit_compile=false"]),
    (["strategy.kind=multi_worker", "train.gradient_accumulation_steps=3"],
     ["train.gradient_accumulation_steps = 3", "strategy.kind=multi_worker", "cannot sum gradients"]),
    (["strategy.kind=tpu", "train.dtype_policy=mixed_float16"],
     ["train.dtype_policy = mixed_float16", "set train.dtype_policy=mixed_bfloat16"]),
    # devices, processes, meshes
    (["strategy.kind=central_storage"], ["'central_storage'", "model_parallel, multi_worker, one_device"]),
    (["strategy.kind=mirrored", "strategy.devices=0"], ["strategy.devices = 0", "greater than 0", "[gpu:0, gpu:2]"]),
    (["strategy.kind=mirrored", "strategy.devices=[cpu:0]"], ["strategy.devices = ['cpu:0']", "gpu:"]),
    (["strategy.kind=multi_worker", "strategy.min_workers=1"],
     ["min_workers = 1 needs launcher=ray, but launcher = None"]),
    (["strategy.kind=parameter_server", "train.loop=custom", "strategy.cpus=1", "strategy.launcher=local"],
     ["cpus = 1 needs launcher=ray, but launcher = local"]),
    (["strategy.kind=model_parallel", "strategy.launcher=ray", "strategy.workers=2", "strategy.min_workers=1",
      "strategy.cpus=1", "strategy.mesh_shape=[1, 2]"],
     ["min_workers = 1: mesh_shape = [1, 2] needs the devices of all workers"]),
    (["strategy.kind=multi_worker", "strategy.launcher=ray", "strategy.min_workers=3"],
     ["min_workers = 3 is more than workers = 2"]),
    (["strategy.kind=multi_worker", "strategy.launcher=ray", "strategy.min_workers=1"],
     ["min_workers = 1", "Set cpus, the number of cores"]),
    (["strategy.kind=multi_worker", "strategy.launcher=ray", "strategy.min_workers=1", "strategy.cpus=1"],
     ["strategy.min_workers = 1", "Set train.global_batch_size, and train.per_replica_batch_size=null"]),
    (["strategy.kind=multi_worker", "strategy.launcher=ray", "strategy.min_workers=2", "strategy.cpus=1",
      "strategy.workers=3", "train.per_replica_batch_size=null", "train.global_batch_size=64"],
     ["train.global_batch_size = 64 must be divisible", "strategy.workers = 3", "strategy.min_workers = 2"]),
    (["strategy.kind=multi_worker", "strategy.launcher=slurrm"],
     ["strategy.launcher = 'slurrm'", "'local', 'tf_config', 'slurm' or 'ray'"]),
    (["strategy.kind=tpu", "strategy.tpu=3"], ["strategy.tpu = 3", "TPU_NAME"]),
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[2, 4]", "strategy.devices=6"],
     ["strategy.mesh_shape = [2, 4]", "2 * 4 = 8 devices, but workers = 1 with devices = 6 have 6"]),
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[1, 3]", "strategy.workers=2"],
     ["strategy.mesh_shape = [1, 3]", "3 devices, but workers = 2 with devices = 1 have 2"]),
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[2, 4]", "strategy.workers=2", "strategy.devices=8"],
     ["strategy.mesh_shape = [2, 4]", "8 devices, but workers = 2 with devices = 8 have 16"]),
    (["strategy.kind=data_parallel", "strategy.workers=2", "strategy.devices=[gpu:0]"],
     ["names devices of one process, but workers = 2", "the number of devices that each has"]),
    (["strategy.kind=data_parallel", "strategy.launcher=slurm"],
     ["launcher = 'slurm' starts several processes, but workers = 1", "set strategy.workers=N"]),
    (["strategy.kind=model_parallel", "strategy.mesh_shape=[8]"], ["strategy.mesh_shape = [8]", "['batch', 'model']"]),
    (["strategy.kind=model_parallel", "strategy.axis_names=[batch, batch]"],
     ["axis_names = ['batch', 'batch']", "each axis"]),
    (["strategy.kind=model_parallel", "strategy.layout={'d1/kernel(': [null, model]}"],
     ["strategy.layout has the rule 'd1/kernel('", "not a regular expression", "such as .*kernel"]),
    # Flags stand only at an expression's start, and Keras is given the end of a path.
    (["strategy.kind=model_parallel", "strategy.layout={'(?i)D1/kernel': [null, model]}"],
     ["strategy.layout has the rule '(?i)D1/kernel'", "not a regular expression"]),
    (["strategy.kind=model_parallel", "strategy.layout={d1/kernel: [null, width]}"],
     ["strategy.layout has the rule 'd1/kernel'", "'width'", "use null", "batch, model"]),
    (["strategy.kind=model_parallel", "strategy.layout={a: [x-y]}"], ["strategy.layout = {'a': ['x-y']}", "letters"]),
    # how it is trained
    (["train.loss=hinge"], ["train.loss = 'hinge'", "'auto', 'sparse_categorical_crossentropy'"]),
    # not settings at all
    (["train.epochs"], ["--set train.epochs", "section.key=value"]),
    (["=3"], ["--set =3", "section.key=value"]),
    (["train.epochs=[1"], ["--set train.epochs=[1", "not valid YAML"]),
    (["model.options.x=!!python/object/apply:os.getcwd []"], ["line 1", "the tag", "python/object"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "said"), BAD, ids=[" ".join(overrides) for overrides, _ in BAD])
def test_a_wrong_setting_gives_one_message(overrides, said):
    message = message_of(overrides)
    for text in said:
        assert text in message


KINDS_OF_STRATEGY = config.strategy_kinds()
# How each feature is asked for, with a strategy that offers it.
ASK = {
    "train.jit_compile": "train.jit_compile=true",
    "train.gradient_accumulation_steps": "train.gradient_accumulation_steps=2",
    "train.deterministic": "train.deterministic=true",
} | {feature: feature for feature in config.FEATURES if "=" in feature}


@pytest.mark.parametrize("kind", KINDS_OF_STRATEGY)
@pytest.mark.parametrize("feature", config.FEATURES)
def test_a_feature_is_refused_where_it_does_not_work_and_nowhere_else(kind, feature):
    section = KINDS_OF_STRATEGY[kind]
    overrides = [f"strategy.kind={kind}", f"train.loop={section.loops[0]}", ASK[feature]]
    if feature in section.refuses:
        message = message_of(overrides)
        assert message.startswith(f"{feature.partition('=')[0]} = ")
        assert f"strategy.kind={kind}" in message
        assert section.refuses[feature] in message
    else:
        without = f"{feature.partition('=')[0]}={yaml.safe_dump(config.FEATURES[feature])}"
        for given, asked in (
            (overrides, True),
            (overrides[:-1], False),
            ([*overrides[:-1], without.removesuffix("...\n")], False),
        ):
            assert asks_for(feature, config.load(None, given, ROOT).flat()) is asked


@pytest.mark.parametrize("kind", KINDS_OF_STRATEGY)
def test_a_strategy_refuses_only_features_that_are_known(kind):
    assert KINDS_OF_STRATEGY[kind].refuses.keys() <= config.FEATURES.keys()
    assert set(KINDS_OF_STRATEGY[kind].loops) <= {"fit", "custom"}
    assert kind in config.names_of("strategies")


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
    (root / "recipes/windows.yaml").write_text("train: {epochs: 1}", "utf-16")
    assert message_of([], "windows", root).endswith("yaml: cannot be read because it is not UTF-8. Save it in UTF-8")


def test_each_recipe_overrides_those_before_it(root, monkeypatch):
    write_recipe(root, "train: {epochs: 1, seed: 5}\n", "first")
    write_recipe(root, "train: {epochs: 2}\nschedule: {kind: constant}\n", "second")
    found = config.load(["first", "second"], ["train.steps_per_epoch=9"], root)
    assert (found.train.epochs, found.train.seed, found.schedule.kind) == (2, 5, "constant")
    assert config.load(["second", "first"], (), root).train.epochs == 1
    assert config.load([], (), root) == config.load(None, (), root)
    (root / ".dvc").mkdir()
    monkeypatch.chdir(root)
    sources = config.sources_of(["first", "second"], ["train.steps_per_epoch=9"], None)
    assert [sources[f"train.{key}"][1] for key in ("seed", "epochs", "steps_per_epoch")] == [
        "recipe first", "recipe second", "--set",
    ]  # fmt: skip


def test_an_unknown_recipe_names_the_nearest(root):
    write_recipe(root, "train: {epochs: 1}\n", "mnist")
    write_recipe(root, "train: {epochs: 1}\n", "cifar10")
    message = message_of([], "mnits", root)
    assert "unknown recipe 'mnits': did you mean 'mnist'? Allowed: cifar10, mnist" in message
    gone = str(root / "gone.yaml")
    assert f"unknown recipe '{gone}'" in message_of([], gone, root)
    assert message_of([], "digits", root).endswith("To choose a dataset, pass --set dataset.name=digits")


@pytest.mark.parametrize("key", ["train.epochs", "dataset.name", "schedule.learning_rate", "strategy.kind", "tracking"])
def test_a_key_that_params_yaml_lacks_is_named(root, key):
    section, _, name = key.partition(".")
    values = yaml.safe_load((root / "params.yaml").read_text())
    if name:
        del values[section][name]
    else:
        del values[section]
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    assert message_of([], root=root).startswith(f"{key} is missing")


def test_a_key_of_params_yaml_that_is_written_wrong_is_named(root):
    text = (root / "params.yaml").read_text()
    (root / "params.yaml").write_text(text.replace("  epochs: ", "  epochz: "))
    assert message_of([], root=root).startswith("unknown key 'train.epochz': did you mean 'train.epochs'?")


def test_no_params_yaml(tmp_path):
    assert "params.yaml: cannot be read" in message_of([], root=tmp_path)


# Text that PyYAML misreads silently, or whose error would fill pages.
ODD = [
    (
        "model: {options: !!python/name:os.system x}\n",
        "line 1, column 18: could not determine a constructor for the tag",
    ),
    ("model: {options: &a {b: *a}}\n", "line 1, column 25: *a refers to an anchor: write out its value"),
    ("train: {epochs: 1}\n# " + "x" * 1_000_000, "at most 1,000,000"),
    ("train:\n  epochs: 1\n  seed: 2\n  epochs: 3\n", "line 4, column 3: the key 'epochs' appears twice"),
    ("train:\n  epochs: 1\nmodel: {}\ntrain: {}\n", "line 4, column 1: the key 'train' appears twice"),
    ("model: {options: {a: .nan}}\n", "finite number"),
    ("train: {epochs: 2001-01-01}\n", "train.epochs = '2001-01-01'"),
    (f"train: {{epochs: {'x' * 9000}}}\n", "train.epochs = 'xxx"),
    (f"{'x' * 900}: 1\n", "unknown section 'xxx"),
]


@pytest.mark.parametrize(("text", "said"), ODD, ids=[text[:30] for text, _ in ODD])
def test_odd_yaml_gives_one_short_message(root, text, said):
    message = message_of([], write_recipe(root, text), root)
    assert said in message
    assert len(message) <= 1000


# Each row: what was accepted, and killed a run later, or the machine.
TOO_MUCH = [
    "train.epochs=1000000000000000000000000000000", "train.steps_per_epoch=2147483648",
    "train.per_replica_batch_size=99999999999", "evaluate.global_batch_size=1.0e+30", "checkpoint.keep=2000000000",
    "input.shuffle_buffer=1000000001", "input.prefetch=1000000", "input.validation=1000000000000",
    "input.memory_budget_bytes=1000000000000000000000", "input.augmentation.crop_padding=40000",
    "input.augmentation.rotation=1.5", "input.augmentation.rand_augment={num_layers: 1000}",
    "dataset.image_size=[1, 1000000]", "schedule.warmup_epochs=1.0e+308", "schedule.learning_rate=1.0e+39",
    "schedule={kind: piecewise, boundaries_epochs: [], learning_rates: [0.1]}",
    "strategy={kind: mirrored, devices: 1000000}", "strategy={kind: multi_worker, workers: 1000000}",
    "strategy={kind: multi_worker, heartbeat_timeout_seconds: 1.0e+308}", "register.alias=" + "a" * 300,
]  # fmt: skip


@pytest.mark.parametrize("text", TOO_MUCH)
def test_what_no_run_could_bear_is_refused(text):
    key = text.partition("=")[0]
    assert message_of([text]).startswith(key)


def test_order_of_the_layers(root):
    write_params(root, train={"epochs": 1, "seed": 1}, checkpoint={"keep": 1})
    recipe = write_recipe(root, "train: {epochs: 2, seed: 2}\n")
    settings = config.load(recipe, ["train.epochs=3"], root)
    assert (settings.train.epochs, settings.train.seed, settings.checkpoint.keep) == (3, 2, 1)
    by_path = config.load(str(root / "recipes" / "worked.yaml"), ["train.epochs=3"], root)
    assert by_path == settings
    assert config.load(None, [], root).train.epochs == 1
    assert config.load(None, ["train.epochs=5", "train.epochs=6"], root).train.epochs == 6


@pytest.mark.parametrize("recipe", config.recipes(ROOT))
def test_every_recipe_of_the_project_loads(recipe):
    text = (ROOT / "recipes" / f"{recipe}.yaml").read_text()
    overlay = yaml.safe_load(text)
    assert text.startswith("#"), "the first lines say command, time and expected result"
    loaded = config.load(recipe, root=ROOT).to_json()
    for section, keys in overlay.items():
        for key, value in keys.items():
            assert loaded[section][key] == value or isinstance(value, dict)


START = {"initial": None, "new_head": False, "freeze": []}
MLP = {"name": "mlp", "options": {"units": [8]}} | START
# Each row: params.yaml's section, what lies over it, and the section that comes out.
KINDS = [
    ("optimizer", {"kind": "adam", "global_clipnorm": 1.0}, ["optimizer.kind=sgd", "optimizer.momentum=0.9"],
     {"kind": "sgd", "global_clipnorm": 1.0, "momentum": 0.9, "nesterov": False}),
    ("schedule", {"kind": "constant", "learning_rate": 0.01}, ["schedule.kind=cosine"],
     {"kind": "cosine", "learning_rate": 0.01, "warmup_epochs": 1.0, "final_learning_rate": 0.0}),
    ("schedule", {"kind": "constant", "learning_rate": 0.01}, ["schedule.kind=piecewise"],
     {"kind": "piecewise", "boundaries_epochs": [3, 7], "learning_rates": [1e-3, 1e-4, 1e-5]}),
    ("strategy", {"kind": "one_device", "device": "cpu"}, ["strategy.devices=2", "strategy.kind=mirrored"],
     {"kind": "mirrored", "devices": 2, "cross_device_ops": "auto"}),
    ("strategy", {"kind": "mirrored", "devices": 2, "cross_device_ops": "nccl"}, ["strategy.kind=data_parallel"],
     {"kind": "data_parallel", "devices": 2, "launcher": None, "workers": 1,
      "min_workers": None, "cpus": None, "max_restarts": 3, "heartbeat_timeout_seconds": 60.0}),
    ("strategy", {"kind": "mirrored", "devices": 2}, ["strategy.kind=parameter_server", "train.loop=custom"],
     {"kind": "parameter_server", "launcher": None, "workers": 2, "min_workers": None, "cpus": None, "max_restarts": 3,
      "heartbeat_timeout_seconds": 60.0, "ps": 1}),
    ("strategy", {"kind": "one_device", "device": "cpu"}, ["strategy.kind=one_device"],
     {"kind": "one_device", "device": "cpu"}),
    ("model", MLP, ["model.name=convnet"],
     {"name": "convnet", "options": {}} | START),
    ("model", MLP,
     ["model.name=convnet", "model.options.dropout=0.5"],
     {"name": "convnet", "options": {"dropout": 0.5}} | START),
    ("model", MLP, ["model.options.dropout=0.5"],
     {"name": "mlp", "options": {"units": [8], "dropout": 0.5}} | START),
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


def test_every_setting_says_once_what_it_affects():
    for key, field in config.fields_of(config.Settings):
        marks = [mark for mark in field.metadata if isinstance(mark, config.Affects)]
        assert len(marks) == 1, f"{key}: mark it Result, Course, Speed or Bookkeeping, see tasks/config/section.py"
        assert marks[0] == config.marks_of(config.Settings)[key], f"{key} is marked otherwise for another kind"


def changed(section, path):
    """Return a copy of frozen settings in which one key, and nothing else, holds another value."""
    name, *rest = path
    field = "register_" if name == "register" else name
    if isinstance(section, dict):
        return section | {name: "something else"}
    value = changed(getattr(section, field), rest) if rest else "something else"
    return section.model_copy(update={field: value})


# What is named by hand, so that a wrong mark shows: the rest of the keys changes the result.
NO_RESULT = {
    "checkpoint.keep", "checkpoint.remote", "dataset.builder", "dataset.downloads", "evaluate.global_batch_size",
    "evaluate.strategy", "input.cache", "input.memory_budget_bytes", "input.prefetch",
    "register.alias", "register.ceilings", "register.confidence", "register.enabled", "register.floors",
    "register.metric", "register.min_improvement", "register.minimum", "register.model_name",
    "strategy.communication", "strategy.cpus", "strategy.heartbeat_timeout_seconds", "strategy.launcher",
    "strategy.max_restarts", "strategy.min_workers",
    "tracking.experiment", "tracking.metric_names", "tracking.system_metrics", "train.jit_compile", "train.loop",
    "train.steps_per_execution", "train.tensorboard", "train.traced_steps",
}  # fmt: skip


def test_the_digest_is_of_what_affects_the_result():
    cluster = ["strategy.kind=multi_worker", "train.early_stopping={}", "dataset.downloads=/archives"]
    settings = config.load(None, cluster, ROOT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pydantic: "something else" is not of the key's type
        ignored = {key for key in settings.flat() if changed(settings, key.split(".")).digest() == settings.digest()}
    assert ignored == NO_RESULT


def test_workers_must_agree_on_more_than_the_result():
    """Two loops end with the same weights; a worker that runs another one than the chief waits for ever."""
    fit, custom = (config.load(None, [f"train.loop={loop}"], ROOT) for loop in ("fit", "custom"))
    assert fit.digest() == custom.digest()
    assert fit.digest("result", "speed") != custom.digest("result", "speed")
    alone = config.load(None, ["register.enabled=false"], ROOT)
    assert fit.digest("result", "speed") == alone.digest("result", "speed")


def test_the_floors_are_one_value():
    floors = {"3": 0.8, "T-shirt/top.": 0.7}
    settings = config.load(None, {"register.floors": floors}, ROOT)
    assert settings.register_.floors == settings.flat()["register.floors"] == floors
    assert config.load(None, ["register.floors={3: 0.8}"], ROOT).register_.floors == {"3": 0.8}
    assert config.load(None, ["register.floors.3=0.8"], ROOT).register_.floors == {"3": 0.8}


def test_floors_of_a_recipe_are_replaced(tmp_path):
    recipe = tmp_path / "floors.yaml"
    recipe.write_text("register: {floors: {3: 0.8}}")
    assert config.load(str(recipe), ["register.floors={}"], ROOT).register_.floors == {}
    assert config.load(str(recipe), ["register.floors={4: 0.9}"], ROOT).register_.floors == {"4": 0.9}
    recipe.write_text("register: {ceilings: {'age: 1 to 2.5': 8}}")
    assert config.load(str(recipe), ["register.ceilings={'age: 3': 9}"], ROOT).register_.ceilings == {"age: 3": 9}


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


def errors_of(overrides):
    """Return what Prefect's server says of a deployment's parameters before a run exists."""
    schema = {"type": "object", "properties": {"overrides": config.Overrides.model_json_schema()}}
    return [f"{error.json_path}: {error.message}" for error in validate({"overrides": overrides}, schema)]


def test_a_deployment_refuses_what_is_out_of_bounds():
    for good in (
        {},
        {"train.epochs": 3, "strategy.devices": 2, "train.early_stopping": None, "model.options": {"units": [8]}},
        {"train": {"epochs": 3, "early_stopping": {"patience_epochs": 1}}, "strategy": {"kind": "mirrored"}},
    ):
        assert errors_of(good) == []
    for bad, said in (
        ({"common": {"train.epochs": 0}}, "0 is less than or equal to the minimum of 0"),
        ({"common": {"strategy.kind": "mirored"}}, "'mirored' is not one of ['one_device', 'mirrored'"),
        ({"train": {"gradient_accumulation_steps": 0}}, "0 is less than"),
    ):
        (error,) = errors_of(bad)
        assert said in error


def test_a_key_that_does_not_exist_is_answered_with_the_one_that_was_meant():
    """By the run: Prefect's server would answer with the patterns of all keys."""
    for given in ({"train.epohcs": 3}, {"train": {"epohcs": 3}}):
        assert errors_of(given) == []
        with pytest.raises(UserError, match=r"unknown key 'train.epohcs': did you mean 'train.epochs'"):
            config.load(None, config.Overrides.model_validate(given).given(), ROOT)


def test_what_the_form_leaves_open_is_not_given():
    """It sends null for each field that nobody filled in."""

    def nothing(properties):
        return {k: nothing(v["properties"]) if "properties" in v else None for k, v in properties.items()}

    form = config.Overrides.model_json_schema()["properties"]
    common, sections = nothing(form.pop("common")["properties"]), nothing(form)
    shown = {f"{section}.{key}" for section, keys in sections.items() for key in keys}
    assert len(common) == 10
    assert shown.isdisjoint(common)
    assert shown.union(common) >= {key for key in config.load(root=ROOT).flat() if key.count(".") == 1}
    sent = {"common": common | {"train.epochs": 2}, **sections}
    sent["train"] |= {"deterministic": "true"}
    sent["train"]["early_stopping"]["patience_epochs"] = 1
    assert errors_of(sent) == []
    given = config.Overrides.model_validate(sent).given()
    assert given == {"train.epochs": 2, "train": {"deterministic": True, "early_stopping": {"patience_epochs": 1}}}
    assert config.load(None, given, ROOT).train.early_stopping.monitor == "validation/loss"
    # Where null is meant, the key is written out.
    dotted = {"train.early_stopping": None, "input": {"validation": None}, "checkpoint.monitor": "train/loss"}
    given = config.Overrides.model_validate(dotted).given()
    assert given == {"train.early_stopping": None, "checkpoint.monitor": "train/loss"}


def test_the_form_explains_each_setting():
    def found(properties, prefix=""):
        for name, shown in properties.items():
            if "properties" in shown:
                yield from found(shown["properties"], f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", shown

    shown = config.Overrides.model_json_schema()["properties"]
    common = shown.pop("common")["properties"]
    form = common | dict(found(shown))
    assert "params.yaml: 15." in form["train.epochs"]["description"]
    assert form["dataset.name"]["description"].startswith("A TFDS dataset of images, texts or numbers")
    assert (
        "Only for multi_worker, parameter_server, data_parallel, model_parallel."
        in form["strategy.workers"]["description"]
    )
    assert [one["title"] for one in form["input.validation"]["anyOf"]] == ["text", "fraction", "number", "not given"]
    for key, shown in form.items():
        assert shown["title"] == (key if key in common else key.rpartition(".")[2])
        assert not re.search(r"(?<!\\)<", shown["description"]), "Markdown would leave out what looks like a tag"
        assert shown.get("type") != "boolean", f"{key}: the form sends false for a box that nobody ticked"
    assert set(config.recipes(ROOT)) == set(config.recipe_schema()["anyOf"][0]["enum"])


def test_the_project_is_found_from_inside_but_not_from_outside(project, tmp_path, monkeypatch):
    inside = project / "data" / "deep"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    assert config.project_root() == project
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    with pytest.raises(UserError, match=f"no project here: neither {elsewhere} nor a folder above it"):
        config.project_root()


def test_settings_and_records_load_no_framework(run):
    code = "import sys, tasks.config, tasks.records; print(*{name.partition('.')[0] for name in sys.modules})"
    result = run(["python", "-c", code])
    assert result.returncode == 0, result.stderr
    heavy = {"tensorflow", "keras", "jax", "numpy", "mlflow", "prefect", "dvc", "tensorflow_datasets", "rich", "typer"}
    assert heavy.isdisjoint(result.stdout.split())


def test_the_rules_of_a_layout_belong_together():
    recipe = config.load("model-parallel", (), ROOT).strategy
    # As Keras' guide to distribution writes them: nothing has the path d1/bias.
    assert recipe.layout == {"d1/kernel": [None, "model"], "d1/bias": ["model"], "d2/output": ["data", None]}
    assert (recipe.axis_names, recipe.unmatched_rules) == (["data", "model"], "warn")
    assert config.load("model-parallel", ["strategy.layout={}"], ROOT).strategy.layout == {}
    own = ["strategy.layout={'.*kernel': [null, model]}"]
    assert config.load("model-parallel", own, ROOT).strategy.layout == {".*kernel": [None, "model"]}
    read = config.read_overrides(["strategy.model_parallel.layout={'.*kernel': [null, model]}"])
    assert read == {"strategy.model_parallel.layout": {".*kernel": [None, "model"]}}


def test_what_becomes_of_an_unmatched_rule_makes_no_other_run():
    sections = ["strategy.kind=model_parallel"], ["strategy.kind=model_parallel", "strategy.unmatched_rules=warn"]
    before, asked = (config.load(None, overrides, ROOT) for overrides in sections)
    assert before.strategy.unmatched_rules == "refuse"
    assert before.digest() == asked.digest()


def test_a_null_that_another_kind_left_in_params_yaml_says_nothing(root):
    """As `dvc exp run -S strategy.kind=mirrored -S +strategy.devices=2` leaves the file."""
    write_params(root, strategy={"kind": "mirrored", "devices": 2})
    assert yaml.safe_load((root / "params.yaml").read_text())["strategy"]["device"] is None
    assert config.load(None, (), root).strategy.devices == 2
    write_params(root, strategy={"device": "/gpu:0"})
    assert message_of([], root=root).startswith("unknown key 'strategy.device': did you mean 'strategy.devices'")
    write_params(root, strategy={"device": None, "dvice": None})
    assert message_of([], root=root).startswith("unknown key 'strategy.dvice'")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tracking.experiment", "https://me:s3cret@host/runs"),
        ("register.model_name", "postgresql://me:s3cret@host/runs"),
        ("model.options", {"api_key": "s3cret-1"}),
        ("model.options", {"api_keys": ["s3cret-1", "s3cret-2"]}),
        ("model.options", {"units": [64], "login": {"hub_token": "s3cret-1"}}),
        ("dataset.downloads", "s3://key:s3cret@bucket/archives"),
    ],
)
def test_a_password_is_no_setting(project: Path, key: str, value: object) -> None:
    section, name = key.split(".")
    Path("recipe.yaml").write_text(yaml.safe_dump({section: {name: value}}))
    for recipe, overrides in ((None, {key: value}), ("recipe.yaml", {})):
        with pytest.raises(UserError, match=rf"^{key}\S* seems to hold a password, which every") as refused:
            config.load(recipe, overrides)
        assert "s3cret" not in str(refused.value)


def test_what_is_no_password_is_a_setting(project: Path) -> None:
    options = {"tokens": 5, "tokenizer": "words", "token_dim": "wide enough", "token": "[M]", "key": "a@b"}
    assert config.load(None, {"model.options": options}).model.options.items() >= options.items()
