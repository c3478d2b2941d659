"""This process's place in a cluster that someone else starts, from the variable TF_CONFIG. In a pod of a Kubernetes
Indexed Job, which `stratagem submit --launcher kubernetes` writes, the pod's index replaces `task`."""

import os
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from tasks import config
from tasks.strategies import tasks_of
from tasks.strategies.engines import Member, joined_member
from tasks.system.errors import UserError

SHARED_NETWORK = "the machines of TF_CONFIG share a network"
STARTS_ALL = False
INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in each pod of an Indexed Job; the pods are the chief, then the workers, then the servers."""
EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'


class Task(BaseModel):
    """This process's own place."""

    type: str
    index: Annotated[int, Field(ge=0, strict=True)]


class TfConfig(BaseModel):
    """The value of TF_CONFIG."""

    cluster: dict[str, Annotated[list[Annotated[str, Field(pattern=r"^.+:\d+$")]], Field(min_length=1)]]
    task: Task | None = None


def members(section: config.AnyCluster) -> list[Member]:
    """Return this process's member.

    Raises:
        UserError: TF_CONFIG is invalid or does not fit the strategy, its port is taken, or the machine has fewer GPUs
            than the settings ask for.
    """
    text = os.environ.get("TF_CONFIG")
    if not text:
        raise UserError(f"strategy.launcher = 'tf_config': TF_CONFIG is not set. Set it, such as TF_CONFIG='{EXAMPLE}'")
    try:
        found = TfConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = [".".join(map(str, first["loc"]))] if first["loc"] else []
        told = ": ".join([*where, first["msg"]])
        raise UserError(f"TF_CONFIG = '{text}': {told}. Write it as {EXAMPLE}") from None
    cluster, task, index, need_all = found.cluster, found.task, os.environ.get(INDEX, ""), section.chief_gives_work
    jobs = ("chief", "worker", "ps") if need_all else ("chief", "worker")
    if not set(jobs) >= cluster.keys() or len(cluster.get("chief", [])) > 1 or (need_all and set(cluster) != set(jobs)):
        wanted = "one chief, workers and ps" if need_all else "workers and at most one chief"
        raise UserError(f"TF_CONFIG = '{text}': strategy.kind={section.kind} needs a cluster of {wanted}")
    if task is None:
        tasks = [Task(type=job, index=place) for job, place in tasks_of(cluster)]
        if not index.isdecimal() or int(index) >= len(tasks):
            raise UserError(
                f"TF_CONFIG = '{text}': `task` is missing, and {INDEX} = {index!r} is not the number of a pod. Write "
                f"it as {EXAMPLE}"
            )
        task = tasks[int(index)]
    if task.index >= len(cluster.get(task.type, [])):
        raise UserError(f"TF_CONFIG = '{text}': the cluster has no {task.type} {task.index}: correct `task`")
    return [joined_member(section, cluster, task.type, task.index, source="TF_CONFIG")]
