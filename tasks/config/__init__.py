"""The settings of a run: what every key means and may hold, and how params.yaml, a recipe and ``--set`` give it."""

from tasks.config.data_defaults import Choice
from tasks.config.datasets import (
    AnyDescription,
    Arrays,
    DataCheck,
    Description,
    ImageFolder,
    LocalDescription,
    Table,
    TableColumn,
    Tfds,
    describe,
    description_kinds,
    read_description,
)
from tasks.config.form import Overrides, recipe_schema
from tasks.config.input import Augmentation, Input, RandAugment
from tasks.config.project import code_root, has_own_code, names_of, project_root, recipes
from tasks.config.schedules import Constant, Cosine, Piecewise
from tasks.config.schema import (
    CHAMPION,
    FEATURES,
    Checkpoint,
    Dataset,
    Model,
    Register,
    Settings,
    kinds_of,
    split_folder_name,
)
from tasks.config.section import Affects, fields_of, flat, leaves, marks_of, top_k_of
from tasks.config.sources import (
    LATER,
    choices,
    follows_data,
    load,
    overruled,
    parse,
    read_overrides,
    read_texts,
    read_yaml,
    refuse_secrets,
    sources_of,
)
from tasks.config.strategies import (
    AnyCluster,
    AnyStrategy,
    Cluster,
    DataParallel,
    Mirrored,
    ModelParallel,
    MultiWorker,
    OneDevice,
    OnJax,
    ParameterServer,
    StrategySection,
    Tpu,
    strategy_kinds,
)
from tasks.config.train import BATCH_SIZES, EarlyStopping, Train
