"""The table of stages: all that a command can ask of its stage process. `client` asks and `serve` answers by it: a new
stage is one row.

A row names its function: mypy checks what callers give and get by the signature of that function, and the stage process
turns what it is sent into the records that the signature asks for. The process of a command never imports the function,
for that would import a framework.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import NoneType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from tasks.config import Settings
from tasks.records import (
    Comparison,
    EvaluationResult,
    ExportedModel,
    LoggedModel,
    Pace,
    RegisteredModel,
    Run,
    TrainingResult,
)

if TYPE_CHECKING:
    from tasks import evaluate as evaluation
    from tasks import train as training
    from tasks.process import tracked
    from tasks.serving import export as exporting
    from tasks.training import step_time
else:

    class _Elsewhere:
        """A module that only the stage process imports; an attribute is the address of a function, ``module:name``."""

        def __init__(self, module: str) -> None:
            self._module = module

        def __getattr__(self, name: str) -> str:
            return f"{self._module}:{name}"

    evaluation, training = _Elsewhere("tasks.evaluate"), _Elsewhere("tasks.train")
    tracked = _Elsewhere("tasks.process.tracked")
    exporting, step_time = _Elsewhere("tasks.serving.export"), _Elsewhere("tasks.training.step_time")

P = ParamSpec("P")
Output = TypeVar("Output")


@dataclass(frozen=True)
class Stage(Generic[P, Output]):
    """A row of the table."""

    name: str
    function: Callable[Concatenate[Settings, P], Output]
    output: type[Output]
    workers: Callable[..., object] | None = None
    """What the other workers of a cluster run meanwhile, on their part of the data; None if the chief works alone."""
    starts_run: bool = False
    """Whether a run begins or goes on with it: before that, all members of a cluster run ``check``."""
    stops_gently: bool = False
    """Whether it ends after its next step when it is told to stop: its functions take the event ``stop``."""
    on_cpu: bool = False
    """Whether it computes with TensorFlow on the CPU, whatever the run was trained on. A GPU rounds float32 to TF32,
    which would hide the error of a wrongly exported model."""

    def __call__(self, settings: Settings, *unnamed: P.args, **given: P.kwargs) -> Output:
        """Run it in the stage process of this command, see ``client.call``; arguments have their names."""
        from tasks.process import client  # It needs the table.

        return client.call(self, settings, *unnamed, **given)

    @property
    def is_shared(self) -> bool:
        """Whether all workers of a cluster take part."""
        return self.workers is not None

    def load(self, chief: bool) -> Callable[..., Any]:
        """Import and return the function of the chief, or of another worker."""
        module, _, name = str(self.function if chief else self.workers).partition(":")
        function: Callable[..., Any] = getattr(import_module(module), name)
        return function


check = Stage("check", training.check, object, workers=training.check)
measure_pace = Stage("measure_pace", step_time.measure_pace, Pace)
start_run = Stage("start_run", tracked.start_run, Run, starts_run=True)
resume_run = Stage("resume_run", tracked.resume_run, Run, starts_run=True)
train = Stage("train", tracked.train, TrainingResult, workers=training.assist, stops_gently=True)
report_restarts = Stage("report_restarts", tracked.report_restarts, NoneType)
evaluate = Stage("evaluate", tracked.evaluate, EvaluationResult, workers=evaluation.assist)
evaluate_on_one_device = Stage("evaluate on one device", tracked.evaluate, EvaluationResult)
register = Stage("register", tracked.register, RegisteredModel)
write_report = Stage("write_report", tracked.write_report, NoneType)
end_run = Stage("end_run", tracked.end_run, NoneType)
start_comparison = Stage("start_comparison", tracked.start_comparison, Run)
report_comparison = Stage("report_comparison", tracked.report_comparison, Comparison)
start_sweep = Stage("start_sweep", tracked.start_sweep, Run)
report_sweep = Stage("report_sweep", tracked.report_sweep, NoneType)
resume_parent = Stage("resume_parent", tracked.resume_parent, Run)
start_trial = Stage("start_trial", tracked.start_trial, Run, starts_run=True)
resume_trial = Stage("resume_trial", tracked.resume_trial, Run, starts_run=True)
end_trial = Stage("end_trial", tracked.end_trial, NoneType)
find_model = Stage("find_model", tracked.find_model, LoggedModel, on_cpu=True)
export = Stage("export", exporting.export, ExportedModel, on_cpu=True)

STAGES: dict[str, Stage[..., Any]] = {row.name: row for row in [*globals().values()] if isinstance(row, Stage)}
