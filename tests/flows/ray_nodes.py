"""A Ray cluster on this machine, until standard input closes: `python ray_nodes.py FOLDER CPUS CPUS ...`, a node for
each, the head first, at addresses of the loopback of their own. `remove 2` kills a node, `add 1` adds one.

Ray asks another machine's interface for its head where that is at 127.0.0.1, so they are at 127.0.0.2 and on.
"""

import os
import sys
import tempfile
from pathlib import Path

os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_enable_worker_prestart="0",
    # Ray gives each of these 30 s or less, which a busy machine may need.
    RAY_gcs_server_port_wait_time_s="300",
    RAY_agent_register_timeout_ms="300000",
    RAY_raylet_start_wait_time_s="300",
)

from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20


def main(folder: str, *cpus: str) -> None:
    """Print the address of the head, and a line for each thing that was done."""
    # Ray writes the head's address there, too, and makes this folder only where no node was told of another one.
    Path(tempfile.gettempdir(), "ray").mkdir(exist_ok=True)
    cluster = Cluster()
    nodes = []

    def add(number: str) -> None:
        head = {"include_dashboard": False, "temp_dir": folder} if not nodes else {}
        node = cluster.add_node(
            wait=False,
            num_cpus=int(number),
            object_store_memory=STORE_BYTES,
            node_ip_address=f"127.0.0.{2 + len(nodes)}",
            **head,
        )
        nodes.append(node)
        cluster._wait_for_node(node, 300)  # Not `wait_for_nodes`, which counts one that was removed just now.

    for number in cpus:
        add(number)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        do, number = line.split()
        if do == "remove":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            add(number)
        print("done", flush=True)
    cluster.shutdown()


main(*sys.argv[1:])
