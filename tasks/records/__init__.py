"""The small frozen records that cross from one stage to the next. Never a tensor, a dataset or a model."""
# isort: skip_file

from tasks.records.data import (
    HEADLINES, CheckResult, Column, ColumnStatistics, DataDifference, DataQuality, DatasetManifest, DataStatistics,
    Feature, HeldOut, KeptColumn, Offender, PreparedDataset, PreparedSplit, SourceFile, Target, Task, as_input,
)  # fmt: skip
from tasks.records.experiments import (
    Comparison, ComparisonProgress, ComparisonRow, Limits, Pace, Repeat, ScalingPlan, Sweep, SweepPlan, Trial,
)  # fmt: skip
from tasks.records.operations import (
    LEVELS, Explanation, Finding, GivenSetting, Health, Job, JobState, Level, Link, NewProject, Operation,
    PlannedStage, Provenance, ServiceState, Sync, Synced,
)  # fmt: skip
from tasks.records.record import Name, Place, R, Record, load, save
from tasks.records.results import (
    ClassMetrics, EvaluationResult, ExportedModel, Judgement, LoggedModel, ModelVersion, Placement, Predicted,
    PredictionRequest, RegisteredModel, RolledBack, Serving, ServingRequest, StepTime, TensorShape, TrainingResult,
    Tuning, VariablePlacement,
)  # fmt: skip
from tasks.records.runs import (
    Change, Changed, CodeMeanings, Copy, Ended, FlowEnd, Holder, Kept, Lineage, MetricPair, NonFinite, Pruned,
    PrunedRun, Pruning, Reproduction, Run, RunDetails, RunDifference, RunLine, RunList, RunStatus, RunSummary, ToCopy,
)  # fmt: skip
