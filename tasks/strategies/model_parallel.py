"""Variables sharded over a mesh of devices by rules for their paths (keras.distribution.ModelParallel on JAX)."""

import logging
import math
import re
from typing import Any

import jax
import keras

from tasks import config
from tasks.strategies import Strategy, _processes, data_parallel
from tasks.system import upstream
from tasks.system.errors import UserError

log = logging.getLogger(__name__)


class _ModelParallel(data_parallel.EveryExample, keras.distribution.ModelParallel):
    pass


class _PathRecorder(keras.distribution.DataParallel):
    """Records the layer outputs for which Keras asks for a layout; changes nothing."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__(devices=devices)
        self.paths: list[str] = []

    def get_tensor_layout(self, path: str) -> None:
        self.paths.append(path)


def build(section: config.ModelParallel) -> Strategy:
    """Return the strategy of a mesh; a rule of ``section.layout`` matches a path or the end of a path.

    Raises:
        UserError: the mesh needs more devices than JAX has.
    """
    upstream.leave_tensorflow_alone()
    place = _processes.join(section)
    asked = f"strategy.mesh_shape = {section.mesh_shape} needs {math.prod(section.mesh_shape)} devices"
    devices = data_parallel.find_devices(section, asked)
    mesh = keras.distribution.DeviceMesh(section.mesh_shape, section.axis_names, devices)
    layout = keras.distribution.LayoutMap(mesh)
    for rule, axes in section.layout.items():
        layout[section.expression_of(rule)] = tuple(axes)
    distribution = _ModelParallel(layout_map=layout, auto_shard_dataset=False)
    warned: set[str] = set()  # A model is checked before a run begins, and again where it is trained.

    def check_model(model: Any) -> None:
        for warning in _check(section, distribution, model):
            if warning not in warned:
                warned.add(warning)
                log.warning("%s", warning)

    return data_parallel.strategy(section.kind, distribution, place, check_model=check_model)


def _check(section: config.ModelParallel, distribution: Any, model: Any) -> list[str]:
    """Return a warning for each rule without a match, if ``section.unmatched_rules`` is ``warn``.

    Raises:
        UserError: a rule matches nothing, two rules match one path, or a rule does not fit the shape.
    """
    listening = _PathRecorder([str(device) for device in distribution.device_mesh.devices.flat][:1])
    _trace(model, listening)
    shapes = {variable.path: tuple(variable.shape) for variable in model.variables}
    paths = [*shapes, *dict.fromkeys(listening.paths)]
    everything = f"The paths are: {', '.join(paths)}"
    expressions = {rule: section.expression_of(rule) for rule in section.layout}
    used = {path: [rule for rule in section.layout if re.fullmatch(expressions[rule], path)] for path in paths}
    warnings = []
    for rule in section.layout:
        if not any(rule in rules for rules in used.values()):
            nothing = f"strategy.layout: '{rule}' matches no variable and no layer's output. {everything}"
            if section.unmatched_rules == "refuse":
                raise UserError(f"{nothing}. Fix or remove the rule, or set strategy.unmatched_rules=warn")
            warnings.append(nothing)
    for path, rules in used.items():
        if len(rules) > 1:
            both = " and ".join(f"'{rule}'" for rule in rules)
            raise UserError(f"strategy.layout: {both} both match {path}: keep one of them. {everything}")
        if rules and path in shapes:
            _check_shape(section, rules[0], path, shapes[path])
    try:
        _trace(model, distribution)
    except ValueError as error:
        outputs = {rule: section.layout[rule] for path, rules in used.items() if path not in shapes for rule in rules}
        raise UserError(
            f"strategy.layout: {outputs} names more axes than an output has dimensions. Give an axis or null for each"
        ) from error
    return warnings


def _check_shape(section: config.ModelParallel, rule: str, path: str, shape: tuple[int, ...]) -> None:
    axes = section.layout[rule]
    if len(axes) != len(shape):
        raise UserError(
            f"strategy.layout: '{rule}' names {len(axes)} axes, and {path} has the shape {shape}: give an axis or null "
            "for each dimension"
        )
    sizes = dict(zip(section.axis_names, section.mesh_shape, strict=True))
    for dimension, axis in enumerate(axes):
        if axis is not None and shape[dimension] % sizes[axis]:
            raise UserError(
                f"strategy.layout: '{rule}' splits dimension {dimension} of {path}, of shape {shape}, over the "
                f"{sizes[axis]} devices of the axis '{axis}': {shape[dimension]} is not divisible by {sizes[axis]}"
            )


def _trace(model: Any, distribution: Any) -> None:
    """Call a built model on the shape of a batch as ``fit`` does, without computing anything."""
    images = jax.ShapeDtypeStruct((distribution.num_model_replicas, *model.input_shape[1:]), model.input.dtype)
    states = [
        [jax.ShapeDtypeStruct(variable.shape, variable.dtype) for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    ]
    with distribution.scope():
        jax.eval_shape(lambda *arguments: model.stateless_call(*arguments, training=True), *states, images)
