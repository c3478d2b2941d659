"""The small frozen records that stages exchange: never a tensor, a dataset or a model."""

from tasks.records.data import *
from tasks.records.experiments import *
from tasks.records.operations import *
from tasks.records.record import FORMAT, Name, Place, R, Record, at, check_format, load, load_or_none, now, save
from tasks.records.results import *
from tasks.records.runs import *
