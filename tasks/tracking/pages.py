"""MLflow's pages and API on 127.0.0.1, for whoever has the key: `python -m tasks.tracking.pages PORT`.

MLflow has no key of its own without packages that are not installed here (its `basic-auth` imports flask-wtf), and asks
nobody for one by default: every user of the machine could read the project's runs and delete them. So its application
is served inside one that asks. Its check of Host is narrowed to loopback names. Its check of Origin lets pages of every
port of this machine in, so the one outside refuses all but its own.

The environment says what is served, MLFLOW_TRACKING_URI, and to whom, STRATAGEM_KEY (`user:password`); a command line
is read by every user. Jobs, which MLflow's own command starts processes for, are off.
"""

import os
import sys

from tasks.guarded import guarded


def main() -> None:
    """Serve until this process is ended."""
    port = int(sys.argv[1])
    os.environ["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"
    names = [f"127.0.0.1:{port}", f"localhost:{port}"]
    os.environ["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(names)
    import uvicorn
    from mlflow.server.constants import BACKEND_STORE_URI_ENV_VAR

    os.environ[BACKEND_STORE_URI_ENV_VAR] = os.environ["MLFLOW_TRACKING_URI"]
    from mlflow.server.fastapi_app import app

    pages = guarded(app, os.environ["STRATAGEM_KEY"], [f"http://{name}" for name in names])
    uvicorn.run(pages, host="127.0.0.1", port=port, access_log=False)


if __name__ == "__main__":
    main()
