"""The loopback address: ports that this project's servers take, and a proxy that stands before them."""

import os
import socket
from collections.abc import Iterator
from urllib.request import getproxies_environment

from requests.utils import should_bypass_proxies

from tasks.operations.doctor import Here, Remark
from tasks.system.machine import is_free

# MLflow's and Prefect's own, see ``flows.operate.ui``.
PORTS = {"MLflow": 5000, "Prefect": 4200}


def look(here: Here) -> Iterator[Remark]:
    """Yield a proxy that would be asked for 127.0.0.1, a loopback that does not work, and ports that are taken."""
    if "http" in getproxies_environment() and not should_bypass_proxies("http://127.0.0.1", None):
        text = "http_proxy is set, and no_proxy does not name 127.0.0.1: servers of this machine are asked through it"
        yield Remark("error", text, "export no_proxy=127.0.0.1,localhost${no_proxy:+,$no_proxy}")
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
