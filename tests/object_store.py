"""A server that speaks S3 on 127.0.0.1: OpenStack Swift of Debian's packages, with one disk, which is a folder.

    /usr/bin/python3 tests/object_store.py FOLDER PORT PORT PORT PORT

Debian's own Python has Swift, so this file imports nothing of the project. The first port is the one to ask; SIGTERM
ends all four servers, and what FOLDER holds is there again when they restart on it. ``quota`` as a fifth
argument, with a bucket and a number of bytes behind it, limits that bucket, while they run.
"""

import contextlib
import ctypes
import os
import pwd
import signal
import sys
from pathlib import Path

KEY, SECRET = "test:tester", "a-secret-that-nobody-may-read"
PR_SET_PDEATHSIG = 1
ROLES = ("proxy", "account", "container", "object")
CONFIGURATION = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
workers = 0
swift_dir = {folder}
devices = {folder}/disks
mount_check = false
fallocate_reserve = 0
[pipeline:main]
pipeline = {pipeline}
[app:{role}-server]
use = egg:swift#{role}
"""
PROXY = """
allow_account_management = true
account_autocreate = true
conn_timeout = 30
node_timeout = 120
error_suppression_limit = 1000000
[filter:length_of_head]
paste.filter_factory = object_store:length_of_head
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:1
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:slo]
use = egg:swift#slo
[filter:container_quotas]
use = egg:swift#container_quotas
"""
PIPELINE = "length_of_head cache s3api tempauth slo container_quotas proxy-server"


def length_of_head(configuration, **local):
    """Give answers to HEAD a length: Debian 12's eventlet ends others with a chunk, which no client expects there."""

    def around(application):
        def answer(environ, start_response):
            def start(status, headers, problem=None):
                known = any(name.lower() == "content-length" for name, _ in headers)
                return start_response(status, headers if known else [*headers, ("Content-Length", "0")], problem)

            return application(environ, start if environ["REQUEST_METHOD"] == "HEAD" else start_response)

        return answer

    return around


def _make(folder, ports):
    """Write the configurations, and the rings that say where what lies: all on the one disk."""
    from swift.common.ring import RingBuilder

    (folder / "disks" / "d1").mkdir(parents=True, exist_ok=True)
    (folder / "swift.conf").write_text("[swift-hash]\nswift_hash_path_suffix = tests\n[storage-policy:0]\nname = one\n")
    user = pwd.getpwuid(os.getuid()).pw_name
    for role, port in zip(ROLES, ports, strict=True):
        if role != "proxy":
            ring = RingBuilder(2, 1, 0)
            ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "d1", "weight": 1})
            ring.rebalance()
            ring.get_ring().save(str(folder / f"{role}.ring.gz"))
        pipeline = PIPELINE if role == "proxy" else f"{role}-server"
        text = CONFIGURATION.format(role=role, port=port, user=user, folder=folder, pipeline=pipeline)
        text += PROXY.format(secret=SECRET) if role == "proxy" else ""
        (folder / f"{role}-server.conf").write_text(text)


def _limit(folder, bucket, num_bytes):
    """Limit the bytes of a bucket, as its owner would through Swift's own protocol, which needs a memcached."""
    from swift.common import direct_client
    from swift.common.ring import Ring
    from swift.common.utils import Timestamp

    ring = Ring(str(folder), ring_name="container")
    part, nodes = ring.get_nodes("AUTH_test", bucket)
    headers = {"X-Container-Meta-Quota-Bytes": num_bytes, "X-Timestamp": Timestamp.now().internal}
    direct_client.direct_put_container(nodes[0], part, "AUTH_test", bucket, headers=headers)


def main():
    """Serve until SIGTERM."""
    folder, ports = Path(sys.argv[1]).absolute(), sys.argv[2:6]
    import swift.common.utils

    swift.common.utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    if sys.argv[6:7] == ["quota"]:
        _limit(folder, *sys.argv[7:9])
        return
    _make(folder, [int(port) for port in ports])
    from swift.common import storage_policy
    from swift.common.wsgi import run_wsgi

    storage_policy.reload_storage_policies()
    children = []
    for role in ROLES:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(
                PR_SET_PDEATHSIG, signal.SIGKILL
            )  # Swift's servers leave the group of this process.
            sys.exit(run_wsgi(str(folder / f"{role}-server.conf"), f"{role}-server"))
        children.append(child)

    def end(number, frame):
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    os.wait()
    end(0, None)


if __name__ == "__main__":
    main()
