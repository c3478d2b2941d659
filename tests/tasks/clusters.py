"""What the tests of launchers, of their processes and of pipelines say of a cluster."""

import functools
import json

from tasks import config

multi_worker = functools.partial(config.MultiWorker, kind="multi_worker")
data_parallel = functools.partial(config.DataParallel, kind="data_parallel")
model_parallel = functools.partial(config.ModelParallel, kind="model_parallel")
parameter_server = functools.partial(config.ParameterServer, kind="parameter_server")
TWO = ["localhost:40001", "localhost:40002"]


def place_of(job: object, index: object, **cluster: object) -> str:
    """Return TF_CONFIG of a member of a cluster that has these addresses for each job."""
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
