"""The names that a metric may have in the settings: those of tasks/modeling/metrics/, ``top_<k>_accuracy``, and a
user's own ``module:function``."""

import re
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from tasks.config.project import names_of
from tasks.config.section import OTHER_METRIC, OTHER_TEST_METRIC, OTHER_TRAINING_METRIC, OWN_CODE, TOP_K

METRICS = names_of("modeling/metrics")


def top_k_of(name: str) -> int | None:
    """Return the k of ``top_<k>_accuracy``; None of another metric."""
    found = re.fullmatch(TOP_K, name)
    return int(found[0].split("_")[1]) if found else None


OwnCode = Annotated[str, Field(pattern=OWN_CODE, max_length=250)]
"""A user's own `module:function`."""
if TYPE_CHECKING:
    TrainingMetric: TypeAlias = str
    TestMetric: TypeAlias = str
    MetricName: TypeAlias = str
else:
    # A metric of a user's own has the name `module:function`, as validation/my_code:within_ten.
    TrainingMetric = (
        Literal[*(f"{part}/{name}" for part in ("train", "validation") for name in ("loss", *METRICS))]
        | Annotated[str, Field(pattern=OTHER_TRAINING_METRIC, max_length=250)]
    )
    TestMetric = (
        Literal[*(f"test/{name}" for name in (*METRICS, "loss"))]
        | Annotated[str, Field(pattern=OTHER_TEST_METRIC, max_length=250)]
    )
    MetricName = Literal[*METRICS] | Annotated[str, Field(pattern=OTHER_METRIC, max_length=250)]
