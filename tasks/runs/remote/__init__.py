"""Runs at a remote (``checkpoint.remote``), which fsspec reaches: how an address is opened, and what is wrong with it
(`address`); how a run is copied there while it trains, and after (`copying`); how it is brought back (`fetching`)."""

from tasks.runs.remote.address import check
from tasks.runs.remote.copying import copied_meanwhile, deliver_kept, finish
from tasks.runs.remote.fetching import bring, check_still_ours
