"""The loopback address, and the ports that this project's servers take."""

import os
import socket
from collections.abc import Iterator

from tasks.operations.doctor import Here, Remark
from tasks.system.machine import is_free

# MLflow's and Prefect's own, see ``flows.operate.ui``.
PORTS = {"MLflow": 5000, "Prefect": 4200}


def look(here: Here) -> Iterator[Remark]:
    """Yield a loopback that does not work, and ports that are taken."""
    try:
        socket.create_server(("127.0.0.1", 0)).close()
    except OSError as error:
        yield Remark("error", f"no server can listen on 127.0.0.1 ({error})", "sudo ip link set lo up")
        return
    taken = [f"{port} ({name}'s)" for name, port in PORTS.items() if not is_free(port)]
    if taken:
        yield Remark("ok", f"port {', '.join(taken)} is taken: `stratagem ui` takes another one and says which")
    else:
        yield Remark("ok", f"ports {', '.join(map(str, PORTS.values()))} of 127.0.0.1 are free")
    cluster = os.environ.get("TF_CONFIG")
    if cluster:
        text = "TF_CONFIG is set: with strategy.launcher=tf_config this command is a member of that cluster"
        yield Remark("warning", text, "unset TF_CONFIG, if this machine is to train alone")
