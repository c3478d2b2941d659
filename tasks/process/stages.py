"""The table of stages: every function that a command can call in another process. `client` and `child` send the
requests, and `serve` answers them; a new stage is one row.

The stage process has the environment for certain settings and serves one stage after another; a call has its own
process for a single request.

A row names its function. mypy checks the arguments and results of callers by the function's signature, and the stage
process converts the arguments to the records in the signature. If the function has the argument ``stop``, an event, a
signal only sets that, and the function ends after its next step. A command's own process never imports the function,
because that would import a framework.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from tasks.process import child
from tasks.records import (
    Comparison,
    Ended,
    EvaluationResult,
    ExportedModel,
    ModelVersion,
    Pace,
    Predicted,
    RegisteredModel,
    RolledBack,
    Run,
    Sync,
    TrainingResult,
)

if TYPE_CHECKING:
    from tasks import download, experiments, tracked
    from tasks import evaluate as evaluation
    from tasks import register as registration
    from tasks import train as training
    from tasks.process import dvc_program
    from tasks.reports import page
    from tasks.serving import export as exporting
    from tasks.serving import predict as predicting
    from tasks.serving import server
    from tasks.system import imports
    from tasks.tracking import copier, lifecycle, models, registry
    from tasks.training import step_time
else:

    class _Elsewhere:
        """A module that only the other process imports; its attributes are addresses of functions, ``module:name``."""

        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> str:
            return f"{self._module}:{name}"

    evaluation, training = _Elsewhere("tasks.evaluate"), _Elsewhere("tasks.train")
    experiments, tracked = _Elsewhere("tasks.experiments"), _Elsewhere("tasks.tracked")
    exporting, step_time = _Elsewhere("tasks.serving.export"), _Elsewhere("tasks.training.step_time")
    download, dvc_program = _Elsewhere("tasks.download"), _Elsewhere("tasks.process.dvc_program")
    lifecycle, models = _Elsewhere("tasks.tracking.lifecycle"), _Elsewhere("tasks.tracking.models")
    registry, copier = _Elsewhere("tasks.tracking.registry"), _Elsewhere("tasks.tracking.copier")
    predicting, server = _Elsewhere("tasks.serving.predict"), _Elsewhere("tasks.serving.server")
    registration, page = _Elsewhere("tasks.register"), _Elsewhere("tasks.reports.page")
    imports = _Elsewhere("tasks.system.imports")

P = ParamSpec("P")
Output = TypeVar("Output")


@dataclass(frozen=True)
class Stage(Generic[P, Output]):
    """A row of the table."""

    name: str
    function: Callable[P, Output]
    """The first argument is the settings, if it runs in the stage process."""
    output: type[Output]
    workers: Callable[..., object] | None = None
    """The function that the other workers of a cluster run on their part of the data; None if the chief works alone."""
    starts_run: bool = False
    """Whether it starts or resumes a run; all members of a cluster first run ``check``."""
    ends_run: bool = False
    """Whether it ends a run: no signal stops it, and afterwards the rest of the run is copied to ``checkpoint.remote``.
    """
    on_cpu: bool = False
    """Whether it always runs with TensorFlow on the CPU. A GPU rounds float32 to TF32, which would hide the error of a
    wrongly exported model."""
    is_call: bool = False
    """Whether it has its own process, which ends with its answer."""
    imports_framework: bool = False
    """Whether a framework's start-up messages are held back while its module is imported."""
    ends_itself: bool = False
    """Whether its own process has its own process group, and receives SIGTERM and time to end its children when this
    command is interrupted. All others stay in this command's group, so that they can read from the terminal, and are
    killed."""

    def __call__(self, *unnamed: P.args, **given: P.kwargs) -> Output:
        """Run it in the stage process of this command (``client.call``) or in its own process (``child.call``). The
        settings are the first argument; all others are keyword arguments.

        Raises:
            StratagemError: the stage failed, or its process died.
            BrokenPipeError: the reader of its output has closed the pipe.
        """
        if self.is_call:
            return child.call(self, given)
        from tasks.process import client  # Imported here, because it imports this module.

        settings: Any = unnamed[0]
        return client.call(self, settings, **given)

    @property
    def is_shared(self) -> bool:
        """Whether all workers of a cluster take part."""
        return self.workers is not None


check = Stage("check", training.check, object, workers=training.check)
measure_pace = Stage("measure_pace", step_time.measure_pace, Pace)
start_run = Stage("start_run", tracked.start_run, Run, starts_run=True)
resume_run = Stage("resume_run", tracked.resume_run, Run, starts_run=True)
train = Stage("train", tracked.train, TrainingResult, workers=training.assist)
report_restarts = Stage("report_restarts", tracked.report_restarts, NoneType)
evaluate = Stage("evaluate", tracked.evaluate, EvaluationResult, workers=evaluation.assist)
evaluate_on_one_device = Stage("evaluate on one device", tracked.evaluate, EvaluationResult)
register = Stage("register", tracked.register, RegisteredModel)
write_report = Stage("write_report", tracked.write_report, NoneType)
end_run = Stage("end_run", tracked.end_run, NoneType, ends_run=True)
start_comparison = Stage("start_comparison", experiments.start_comparison, Run)
report_comparison = Stage("report_comparison", experiments.report_comparison, Comparison)
start_sweep = Stage("start_sweep", experiments.start_sweep, Run)
report_sweep = Stage("report_sweep", experiments.report_sweep, NoneType)
resume_parent = Stage("resume_parent", experiments.resume_part, Run)
start_trial = Stage("start_trial", experiments.start_trial, Run, starts_run=True)
resume_trial = Stage("resume_trial", experiments.resume_part, Run, starts_run=True)
end_trial = Stage("end_trial", experiments.end_trial, NoneType, ends_run=True)
find_version = Stage("find_version", tracked.find_version, ModelVersion, on_cpu=True)
export = Stage("export", exporting.export, ExportedModel, on_cpu=True)

check_source = Stage("check_source", download.refuse_early, NoneType, is_call=True, imports_framework=True)
reproduce = Stage("reproduce", dvc_program.reproduce, NoneType, is_call=True, ends_itself=True)
is_up_to_date = Stage("is_up_to_date", dvc_program.is_up_to_date, bool, is_call=True)
push = Stage("push", dvc_program.push, NoneType, is_call=True, ends_itself=True)
pull = Stage("pull", dvc_program.pull, NoneType, is_call=True, ends_itself=True)
predict = Stage("predict", predicting.predict, Predicted, is_call=True, imports_framework=True)
serve_model = Stage("serve_model", server.serve, NoneType, is_call=True, imports_framework=True, ends_itself=True)
fetch_model = Stage("fetch_model", models.fetch_files, dict[str, str | None], is_call=True)
write_page = Stage("write_page", page.write, object, is_call=True)
record_reproduction = Stage("record_reproduction", lifecycle.log_reproduction, NoneType, is_call=True)
reconcile = Stage("reconcile", lifecycle.reconcile, list[Ended], is_call=True)
list_versions = Stage("list_versions", registry.list_versions, list[ModelVersion], is_call=True)
sync = Stage("sync", copier.sync, Sync, is_call=True)
devices = Stage("devices", imports.devices_of_tensorflow, list[str], is_call=True, imports_framework=True)
roll_back = Stage("roll_back", registration.rollback, RolledBack, is_call=True, imports_framework=True)

STAGES: dict[str, Stage[..., Any]] = {row.name: row for row in [*globals().values()] if isinstance(row, Stage)}
