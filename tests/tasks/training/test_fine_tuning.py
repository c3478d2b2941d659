"""Layers that are frozen, all along or at first, and where a new run's weights come from."""

from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

from tasks import config
from tasks.modeling import models
from tasks.runs import lineage
from tasks.system.errors import UserError
from tasks.tracking.trained_models import TrainedModel
from tasks.train import check
from tasks.training import initial
from tasks.training.checkpoints import Checkpoints
from tests.tasks.foreign_models import write_huge_model, write_model_of_unknown_class

VGG = ("model={name: vgg, options: {filters: [4, 4]}}", "train.global_batch_size=60", "train.deterministic=true")
BODY = "model.freeze=[conv.*, 'norm1[ab]']"


def by_path(model):
    return {one.path: keras.ops.convert_to_numpy(one) for one in model.weights}


def exported(file):
    return by_path(keras.saving.load_model(file, compile=False))


def made(prepared, *overrides):
    """The weights that a training begins with, by path."""
    settings = config.load(None, [*VGG, *overrides])
    keras.utils.set_random_seed(settings.train.seed)
    return by_path(models.build(settings.model, prepared, settings.input.normalization))


def test_what_is_frozen_keeps_its_bits_and_its_averages(tiny, train):
    trained = train(tiny, *VGG, BODY)
    before, after = made(tiny), exported(trained.final_model)
    frozen = {path for path in after if path.split("/")[-2].startswith(("conv", "norm1"))}
    assert len(frozen) == 12
    assert {path for path in after if np.array_equal(before[path], after[path])} == frozen
    assert trained.history["train/loss"][1] < trained.history["train/loss"][0]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            "[logit]",
            r"no layer's whole name matches 'logit'. The layers with weights are: conv1a, norm1a, conv1b, ",
        ),
        ("[vgg]", r"no layer's whole name matches 'vgg'. The layers with weights are: .*norm2b, logits$"),
        ("[pool1]", "no layer's whole name matches 'pool1'"),
        ("['.*']", r"model.freeze = \['\.\*'\] leaves nothing to be trained"),
    ],
)
def test_names_that_freeze_nothing_or_all_are_refused_before_a_run_exists(tiny, train, project, given, said):
    with pytest.raises(UserError, match=said):
        check(config.load(None, [*VGG, f"model.freeze={given}"]), tiny)


def test_what_is_no_regular_expression_is_refused(project):
    with pytest.raises(UserError, match=r"model\.freeze = \['conv\('\]: input should be a valid regular expression"):
        config.load(None, ["model.freeze=['conv(']"])


# Three steps an epoch; Dropout, batch normalisation, and a schedule over each phase.
PHASES = (
    "model={name: vgg, options: {filters: [4, 4], dropout: 0.3}}", "train.global_batch_size=60", BODY,
    "train.deterministic=true", "schedule={kind: cosine, learning_rate: 0.01, warmup_epochs: 0.0}", "train.epochs=4",
    "train.frozen_epochs=2", "checkpoint.every_steps=2", "checkpoint.keep=9",
    "train.early_stopping={patience_epochs: 9}",
)  # fmt: skip


class Killed(Exception):
    pass


@pytest.mark.exhaustive
def test_a_kill_after_the_thaw_ends_with_the_same_bits(tiny, train):
    whole = train(tiny, *PHASES, run_id="whole")
    assert np.all(np.diff(whole.history["train/learning_rate"])[[0, 2]] < 0)
    assert whole.history["train/learning_rate"][2] == pytest.approx(0.1 * whole.history["train/learning_rate"][0])
    assert whole.steps == 12
    epochs = []

    def send(step, metrics):
        epochs.append(step)
        if len(epochs) == 3:
            raise Killed  # The last checkpoint is that of every_steps.

    with pytest.raises(Killed):
        train(tiny, *PHASES, run_id="cut", send=send)
    assert Checkpoints(Path("mlruns/runs/cut/checkpoints"), read_only=True).steps()[-1] == 8
    rest = train(tiny, *PHASES, run_id="cut", resume=True)
    assert (rest.weights_digest, rest.history) == (whole.weights_digest, whole.history)


def test_what_is_thawed_is_trained_by_a_new_optimizer(tiny, train):
    options = (*PHASES, "checkpoint.every_steps=null")
    result = train(tiny, *options)
    saved = Checkpoints(Path("mlruns/runs/first/checkpoints"), read_only=True)
    begun = made(tiny, *PHASES)
    (frozen, state), (thawed, _) = saved.restore(6), saved.restore(12)
    assert (state.epoch, state.step_in_epoch) == (2, 0)
    still = [key for key, array in zip(frozen, begun.values(), strict=False) if np.array_equal(frozen[key], array)]
    assert len(still) == 12
    assert not any(np.array_equal(frozen[key], thawed[key]) for key in still)
    assert int(thawed["optimizer/0000"]) == 6, "it counts from where the layers were thawed"
    assert exported(result.final_model).keys() == begun.keys()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_rollback_after_the_thaw_goes_back_to_where_the_layers_were_thawed(tiny, train, at_step):
    def diverge(model):
        model.trainable_variables[-1].assign(np.full(model.trainable_variables[-1].shape, np.nan))

    options = ("train.on_nonfinite=rollback", "train.rollback_factor=0.5", "checkpoint.every_steps=null")
    with at_step(7, diverge):  # The first step of the third epoch, from which on all layers are trained.
        result = train(tiny, *PHASES, *options, "schedule={kind: constant, learning_rate: 0.01}")
    assert result.nonfinite_steps == (8,)
    assert result.history["train/learning_rate"] == pytest.approx((0.01, 0.01, 0.0005, 0.0005))
    assert (result.steps, result.epochs) == (12, 4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["train.frozen_epochs=2"], r"train.frozen_epochs = 2: model.freeze = \[\] freezes nothing"),
        ([BODY, "train.frozen_epochs=15"], r"train.frozen_epochs = 15 leaves none of train.epochs = 15"),
    ],
)
def test_phases_that_cannot_be_are_refused(project, given, said):
    with pytest.raises(UserError, match=said):
        config.load(None, given)


FROM = "model.initial=start.keras"


@pytest.fixture
def start(tiny, project):
    """Write start.keras: another draw of the weights of VGG, on these data or on others."""

    def start(prepared=tiny, *overrides):
        settings = config.load(None, [*VGG, *overrides])
        keras.utils.set_random_seed(99)
        model = models.build(settings.model, prepared, settings.input.normalization)
        model.save("start.keras")
        return by_path(model)

    return start


def begun(prepared, *overrides):
    """What a run begins with, by path."""
    settings = config.load(None, [*VGG, FROM, *overrides])
    names = list(made(prepared))
    return dict(zip(names, initial.find_weights(settings, prepared).values(), strict=True))


def test_a_new_head_is_random_and_all_else_is_the_start_models(tiny, make_dataset, start):
    theirs, ours = start(), made(tiny)
    assert {path for path, array in begun(tiny).items() if np.array_equal(array, theirs[path])} == theirs.keys()
    images = np.zeros((40, 8, 8, 1), np.uint8)
    theirs = start(make_dataset("other", 3, train=(images, np.arange(40) % 3), test=(images, np.arange(40) % 3)))
    with pytest.raises(
        UserError,
        match=r"belongs to a different model: conv1a/kernel exists only there, conv1b/kernel exists only there",
    ):
        begun(tiny, "model={name: mlp, options: {units: [4]}}")
    with pytest.raises(
        UserError,
        match=r"model.initial = start.keras belongs to a different model: logits/kernel has the shape \(4, 3\) there "
        r"and \(4, 10\) here, logits/bias .* or model.new_head=true if only the last layer differs",
    ):
        begun(tiny)
    found = begun(tiny, "model.new_head=true")
    new = {"logits/kernel", "logits/bias"}
    assert {path for path, array in found.items() if not np.array_equal(array, theirs[path])} == new
    assert all(np.array_equal(found[path], ours[path]) for path in new)
    with pytest.raises(UserError, match=r"conv2a/kernel has the shape \(3, 3, 4, 4\) there and \(3, 3, 4, 5\) here"):
        begun(tiny, "model.options.filters=[4, 5]", "model.new_head=true")


def test_a_start_model_that_normalises_otherwise_is_refused(tiny, start):
    start()
    said = "its layer normalization normalizes with other constants than this run. Set the input.normalization that"
    with pytest.raises(UserError, match=said):
        begun(tiny, "input.normalization=standardize")
    start(tiny, "input.normalization=standardize")
    begun(tiny, "input.normalization=standardize")


def test_what_keras_cannot_load_is_one_message(tiny, project):
    Path("start.keras").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"model.initial = start.keras: Keras cannot load .*\)$"):
        begun(tiny)
    write_model_of_unknown_class("start.keras")
    with pytest.raises(UserError, match=r"Keras cannot load .*Could not locate .*Register your own classes"):
        begun(tiny)
    write_huge_model("start.keras")
    said = r"model.initial = start.keras: .*start.keras describes a model whose variables take 8.0 TB"
    with pytest.raises(UserError, match=said):
        begun(tiny)
    inputs = keras.Input((8, 8, 1))
    keras.Model(inputs, keras.layers.Lambda(lambda x: x)(inputs)).save("start.keras")
    with pytest.raises(UserError, match=r"Keras cannot load .*[Ll]ambda"):
        begun(tiny)


@pytest.fixture
def photographs(make_dataset):
    images = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 1), dtype=np.uint8)
    return make_dataset("photographs", 4, train=(images, np.arange(20) % 4), test=(images, np.arange(20) % 4))


APPLICATION = (
    "model={name: keras_applications, options: {architecture: VGG16}}", "input.normalization=none", "train.epochs=1",
    "train.global_batch_size=10",
)  # fmt: skip


@pytest.mark.in_ci(0)
@pytest.mark.parametrize("suffix", [".weights.h5", ".h5"])
def test_an_architecture_begins_with_a_file_of_its_weights(photographs, suffix):
    from keras.src.legacy.saving import legacy_h5_format

    theirs = keras.applications.VGG16(include_top=False, weights=None, input_shape=(32, 32, 3))
    file = Path("start" + suffix)
    if suffix == ".h5":  # As Keras offers them.
        with h5py.File(file, "w") as archive:
            legacy_h5_format.save_weights_to_hdf5_group(archive, theirs)
    else:
        theirs.save_weights(file)
    settings = config.load(None, [*APPLICATION, f"model.initial={file}"])
    found = list(initial.find_weights(settings, photographs).values())
    *body, kernel, bias = found
    assert all(map(np.array_equal, body, theirs.get_weights()))
    assert (len(body), kernel.shape, bias.shape) == (26, (512, 4), (4,))
    with pytest.raises(UserError, match=r"cannot load .* into this architecture .*Use the weights of model.options"):
        initial.find_weights(config.load(None, [*APPLICATION, f"model.initial={file}", OTHER]), photographs)


OTHER = "model.options.architecture=VGG19"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((*VGG, "model.initial=start.h5"), "only model.name=keras_applications accepts a file with only weights"),
        ((*APPLICATION, "model.initial=start.h5"), "start.h5 does not exist"),
        ((*APPLICATION, "model.initial=params.h5"), "cannot load .*params.h5 into this architecture"),
    ],
)
def test_a_file_that_is_no_start_of_an_architecture_is_refused(photographs, given, said):
    Path("params.h5").write_text("no HDF5")
    with pytest.raises(UserError, match=f"model.initial = .*{said}"):
        initial.find_weights(config.load(None, given), photographs)


@pytest.mark.slow
def test_the_backbone_stays_as_it_is_when_it_is_frozen(photographs, train):
    settings = (*APPLICATION, "model.options={architecture: MobileNetV2, arguments: {alpha: 0.35}}")
    trained = train(photographs, *settings, "model.freeze=[backbone]", "checkpoint.every_steps=null")
    after = exported(trained.final_model)
    begun = config.load(None, [*settings])
    keras.utils.set_random_seed(begun.train.seed)
    before = by_path(models.build(begun.model, photographs, "none"))
    assert {path for path in after if not np.array_equal(before[path], after[path])} == {"logits/kernel", "logits/bias"}


def test_another_file_of_the_same_name_makes_another_run(project):
    settings = config.load(None, [FROM])
    digests = [lineage.collect(settings, None).code_digest]
    for content in (b"one", b"two"):
        Path("start.keras").write_bytes(content)
        digests.append(lineage.collect(settings, None).code_digest)
    assert len(set(digests)) == 3


def test_a_registered_model_is_fetched_from_the_registry(tiny, start, monkeypatch):
    theirs = start()
    Path("start.keras").rename("fetched.keras")

    def fetch_model(address, folder):
        assert Path(folder).is_dir()
        if address != "models:/digits@best":
            raise UserError(f"there is no {address}")
        return TrainedModel("digits/3", Path("fetched.keras"), None, None)

    monkeypatch.setattr("tasks.tracking.models.fetch_model", fetch_model)
    found = begun(tiny, "model.initial=models:/digits@best")
    assert all(np.array_equal(array, theirs[path]) for path, array in found.items())
    with pytest.raises(UserError, match=r"^model.initial = models:/digits/9: there is no models:/digits/9"):
        begun(tiny, "model.initial=models:/digits/9")


@pytest.mark.parametrize("given", ["start.hdf5", "models:/digits", "models:/digits@a/b", "0123"])
def test_what_names_no_start_is_refused(project, given):
    with pytest.raises(
        UserError, match=r"write a run's id, FILE.keras, FILE.h5, models:/NAME@ALIAS or models:/NAME/VERSION"
    ):
        config.load(None, [f"model.initial={given!r}"])
