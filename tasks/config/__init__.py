"""The settings of a run: the meaning and bounds of every key, and how params.yaml, a recipe and ``--set`` set it."""

from tasks.config.data_defaults import *
from tasks.config.datasets import *
from tasks.config.form import *
from tasks.config.input import *
from tasks.config.optimizers import *
from tasks.config.project import *
from tasks.config.schedules import *
from tasks.config.schema import *
from tasks.config.section import *
from tasks.config.sources import *
from tasks.config.strategies import *
from tasks.config.train import *
