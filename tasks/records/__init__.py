"""The small frozen records that cross from one stage to the next. Never a tensor, a dataset or a model."""

from tasks.records.comparison import Comparison, ComparisonProgress, ComparisonRow, Repeat
from tasks.records.data import (
    HEADLINES,
    Column,
    DataDifference,
    DatasetManifest,
    Feature,
    HeldOut,
    KeptColumn,
    PreparedDataset,
    PreparedSplit,
    SourceFile,
    Target,
    Task,
    as_input,
)
from tasks.records.explanation import Explanation, GivenSetting, PlannedStage
from tasks.records.health import LEVELS, Finding, Health, Level
from tasks.records.jobs import Job, JobState
from tasks.records.operation import Operation, ServiceState
from tasks.records.overview import Kept, NewProject, PrunedRun, Pruning, RunDetails, RunDifference, RunLine, RunList
from tasks.records.predictions import Predicted, PredictionRequest, Serving, ServingRequest
from tasks.records.provenance import Link, Provenance
from tasks.records.quality import CheckResult, ColumnStatistics, DataQuality, DataStatistics, Offender
from tasks.records.record import FORMAT, Name, Place, R, Record, check_format, load, save
from tasks.records.remote import Copy, ToCopy
from tasks.records.reproduction import Change, MetricPair, Reproduction
from tasks.records.results import (
    ClassMetrics,
    EvaluationResult,
    ExportedModel,
    Judgement,
    LoggedModel,
    ModelVersion,
    Placement,
    RegisteredModel,
    RolledBack,
    StepTime,
    TensorShape,
    TrainingResult,
    Tuning,
    VariablePlacement,
)
from tasks.records.runs import (
    Changed,
    CodeMeanings,
    Ended,
    FlowEnd,
    Holder,
    Lineage,
    NonFinite,
    Pruned,
    Run,
    RunStatus,
    RunSummary,
)
from tasks.records.scaling import Pace, ScalingPlan
from tasks.records.sweep import Limits, Sweep, SweepPlan, Trial
from tasks.records.sync import Sync, Synced
