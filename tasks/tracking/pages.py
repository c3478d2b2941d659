"""MLflow's pages and API on a socket that it is given, for whoever has the key: `python -m tasks.tracking.pages FD`.

MLflow has no key of its own without packages that are not installed here (its `basic-auth` imports flask-wtf), and asks
nobody for one by default: every user of the machine could read the project's runs and delete them. So its application
is served inside one that asks. Its check of Origin lets pages of every port of this machine in, so the one outside
refuses all but its own.

The environment says what is served, MLFLOW_TRACKING_URI, and to whom, STRATAGEM_KEY (`user:password`); a command line
is read by every user. Jobs, which MLflow's own command starts processes for, are off.
"""

import os
import socket
import sys

from tasks.system.access import NAMES, guarded


def main() -> None:
    """Serve until this process is ended."""
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(f"{name}:*" for name in NAMES)
    import uvicorn
    from mlflow.server.constants import BACKEND_STORE_URI_ENV_VAR

    os.environ[BACKEND_STORE_URI_ENV_VAR] = os.environ["MLFLOW_TRACKING_URI"]
    from mlflow.server.fastapi_app import app

    pages = guarded(app, os.environ["STRATAGEM_KEY"])
    listening = socket.socket(fileno=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(pages, access_log=False)).run([listening])


if __name__ == "__main__":
    main()
