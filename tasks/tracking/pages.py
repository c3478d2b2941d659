"""Serves MLflow's UI and API on an inherited socket, protected by a key: `python -m tasks.tracking.pages FD`.

By default MLflow requires no login, and its `basic-auth` needs a package that is not installed (flask-wtf): every user
of the machine could read and delete the project's runs. So this module wraps MLflow's application in one that requires
the key. MLflow's check of Origin accepts pages from every port of this machine; the wrapper accepts only its own.

The environment contains the store, MLFLOW_TRACKING_URI, and the key, STRATAGEM_KEY (`user:password`), because every
user can read a command line. MLflow's jobs, which start further processes, are disabled.
"""

import os
import socket
import sys

from tasks.system.access import NAMES, guarded


def main() -> None:
    """Serve until this process ends."""
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(f"{name}:*" for name in NAMES)
    import uvicorn
    from mlflow.server.constants import BACKEND_STORE_URI_ENV_VAR

    from tasks.tracking.store import open_store

    open_store()  # A new store that MLflow's server and a run create simultaneously stays broken.
    os.environ[BACKEND_STORE_URI_ENV_VAR] = os.environ["MLFLOW_TRACKING_URI"]
    from mlflow.server.fastapi_app import app

    pages = guarded(app, os.environ["STRATAGEM_KEY"])
    listening = socket.socket(fileno=int(sys.argv[1]))
    uvicorn.Server(uvicorn.Config(pages, access_log=False)).run([listening])


if __name__ == "__main__":
    main()
