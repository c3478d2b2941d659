"""This process's place among the pods of a Kubernetes Indexed Job.

`stratagem submit --launcher kubernetes` writes the Job and the variables that this module reads.
"""

import os

from tasks import config
from tasks.strategies.engines import Member, member_of_rank
from tasks.system.errors import UserError

SHARED_NETWORK = "Kubernetes' pods share a network"
STARTS_ALL = False
INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in each pod of an Indexed Job."""
ADDRESSES = "STRATAGEM_POD_ADDRESSES"
"""`host:port` of all pods in the order of their index, separated by commas."""


def members(section: config.AnyCluster) -> list[Member]:
    """Return this process's member; members are the pods in the order of their index, the chief first.

    Raises:
        UserError: this process is not a pod of an Indexed Job, or see `member_of_rank`.
    """
    index, addresses = os.environ.get(INDEX, ""), [one for one in os.environ.get(ADDRESSES, "").split(",") if one]
    if not index.isdecimal() or int(index) >= len(addresses):
        raise UserError(
            f"strategy.launcher = 'kubernetes': {INDEX} = {index!r} and {ADDRESSES} with {len(addresses)} addresses: "
            "this process is not a pod of an Indexed Job. `stratagem submit --launcher kubernetes` creates one"
        )
    return [member_of_rank(section, addresses, int(index), "the Indexed Job")]
