"""The settings of a run: what every key means and may hold, and how params.yaml, a recipe and ``--set`` give it."""

from tasks.config.affects import Affects
from tasks.config.form import Overrides, recipe_schema
from tasks.config.project import names_of, project_root, recipes
from tasks.config.schema import (
    BATCH_SIZES,
    FEATURES,
    AnyStrategy,
    Augmentation,
    Checkpoint,
    Cluster,
    Constant,
    Cosine,
    DataParallel,
    Dataset,
    EarlyStopping,
    Input,
    Mirrored,
    Model,
    ModelParallel,
    MultiWorker,
    OneDevice,
    ParameterServer,
    Piecewise,
    Register,
    Settings,
    StrategySection,
    Tpu,
    Train,
    fields_of,
    flat,
    leaves,
    marks_of,
    strategy_kinds,
)
from tasks.config.sources import load, parse, read_overrides, restore
