"""This process's own place among the pods of an Indexed Job of Kubernetes.

`stratagem submit --launcher kubernetes` writes both, and the variables that are read here.
"""

import os

from tasks import config
from tasks.strategies.engines import Member, member_of_rank
from tasks.system.errors import UserError

STARTS_ALL = False
INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in each pod of an Indexed Job."""
ADDRESSES = "STRATAGEM_POD_ADDRESSES"
"""`host:port` of all pods, in the order of their index, with commas between them."""


def members(section: config.AnyCluster) -> list[Member]:
    """Return the one member that this process is: the pods in the order of their index, the chief first.

    Raises:
        UserError: this process is not a pod of such a Job, or see `member_of_rank`.
    """
    index, addresses = os.environ.get(INDEX, ""), [one for one in os.environ.get(ADDRESSES, "").split(",") if one]
    if not index.isdecimal() or int(index) >= len(addresses):
        raise UserError(
            f"strategy.launcher = 'kubernetes': {INDEX} = {index!r} and {ADDRESSES} with {len(addresses)} addresses: "
            "this process is not a pod of an Indexed Job. `stratagem submit --launcher kubernetes` makes one"
        )
    return [member_of_rank(section, addresses, int(index), "the Indexed Job")]


def network() -> str:
    """Return why the members have no network for themselves alone."""
    return "Kubernetes puts them on one that its pods share"
