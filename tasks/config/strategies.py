"""The settings and properties of each strategy, by `strategy.kind`; tasks/strategies/ builds them."""

import math
import re
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from tasks.config.section import (
    DEVICE,
    GPU,
    MAX_COUNT,
    MESH_AXIS,
    ONE_DEVICE,
    Bookkeeping,
    Course,
    Devices,
    Section,
    Speed,
    Text,
)


class StrategySection(Section):
    """What every strategy declares, so that other code need not know its kind."""

    backend: ClassVar[Literal["tensorflow", "jax"]] = "tensorflow"
    loops: ClassVar[tuple[str, ...]] = ("fit", "custom")
    """The loops that can drive it."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Why a feature does not work here, by key of ``FEATURES``."""
    is_baseline: ClassVar[bool] = False
    """Whether a comparison compares the others with it."""
    unit: ClassVar[str] = "replica"
    """What a comparison calls each of its devices."""
    exchange: ClassVar[str] = "summing gradients, with the wait for the last replica,"
    """What its devices do together in a step, in the words of a comparison."""

    @property
    def cluster(self) -> "Cluster | None":
        """These settings if several processes train together, else None."""
        return None

    @property
    def num_processes(self) -> int:
        """All members of the cluster; 1 without one."""
        return 1

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its processes need before they import a framework."""
        return {}

    @property
    def wanted_devices(self) -> int | list[str] | None:
        """On JAX: the number of devices, or their names; None for all devices."""
        return None

    @property
    def required_gpus(self) -> int | None:
        """GPUs that a job must request for each process; None if CPUs can replace them or no number is given."""
        return None


class OneDevice(StrategySection):
    """Everything on one CPU or one GPU."""

    is_baseline: ClassVar[bool] = True
    kind: Course[Literal["one_device"]]
    device: Speed[Annotated[str, Field(pattern=ONE_DEVICE)] | None] = None
    """`cpu`, `gpu` or `gpu:1`; null uses the first GPU, or the CPU if there is none."""

    @property
    def environment(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": ""} if self.device == "cpu" else {}


NO_XLA = "XLA compiles a step for one device, but the copies of a variable are on several"
NO_ACCUMULATION = "Keras then updates the weights inside a condition, where tf.distribute cannot sum gradients"
COPIES_REFUSE = {"train.jit_compile": NO_XLA, "train.gradient_accumulation_steps": NO_ACCUMULATION}


class Mirrored(StrategySection):
    """Synchronous copies on the devices of one machine (tf.distribute.MirroredStrategy)."""

    refuses: ClassVar[Mapping[str, str]] = COPIES_REFUSE
    kind: Course[Literal["mirrored"]]
    devices: Course[Devices | Annotated[list[Annotated[str, Field(pattern=GPU)]], Field(min_length=1)] | None] = None
    """Number of replicas, on GPUs or, if there are none, on logical CPUs; or a list such as [gpu:0, gpu:2]. Null uses
    all GPUs."""
    cross_device_ops: Speed[Literal["auto", "nccl", "hierarchical_copy", "reduction_to_one_device"]] = "auto"
    """How the devices sum gradients; `auto` is NCCL on GPUs, otherwise reduction to one device."""


class Cluster(StrategySection):
    """Several processes that train together."""

    chief_gives_work: ClassVar[bool] = False
    """Whether the other members serve the chief, instead of running the stages with it."""
    launcher: Bookkeeping[Literal["local", "tf_config", "slurm", "ray"] | None] = None
    """`local` starts the processes on this machine; `tf_config` joins the cluster that TF_CONFIG describes, as in a pod
    of Kubernetes, and `slurm` the tasks of a Slurm step; `ray` starts them on a Ray cluster's nodes. Null selects
    `tf_config` or `slurm` if its variables are set, otherwise `local`."""
    workers: Course[Devices] = 2
    """Number of processes that train. If someone else starts the processes of `multi_worker`, the cluster determines
    it."""
    min_workers: Bookkeeping[Devices | None] = None
    """Under `ray`: the smallest number of workers with which a training continues, with the same global batch, when the
    cluster loses a node; null requires all."""
    cpus: Speed[Devices | None] = None
    """Under `ray`: number of cores of each process; null divides the nodes' cores among them."""
    max_restarts: Bookkeeping[Annotated[int, Field(ge=0, le=MAX_COUNT)]] = 3
    """How often lost processes restart, from the latest checkpoint, before the run fails."""
    heartbeat_timeout_seconds: Bookkeeping[Annotated[float, Field(gt=0, le=1e6)]] = 60.0
    """Time without a heartbeat after which a process counts as lost."""

    @property
    def cluster(self) -> "Cluster | None":
        return self

    @model_validator(mode="after")
    def places_agree(self) -> Self:
        for name in ("min_workers", "cpus"):
            value = getattr(self, name)
            if value is not None and self.launcher != "ray":
                raise ValueError(f"{name} = {value} needs launcher=ray, but launcher = {self.launcher}. Set it to null")
        if self.min_workers is None:
            return self
        if self.min_workers > self.workers:
            raise ValueError(f"min_workers = {self.min_workers} is more than workers = {self.workers}: use fewer")
        if self.cpus is None:
            raise ValueError(
                f"min_workers = {self.min_workers}: without cpus it is unknown how many workers fit on the remaining "
                "nodes. Set cpus, the number of cores of each worker"
            )
        return self

    @property
    def num_processes(self) -> int:
        return sum(self.jobs(self.workers).values())

    def jobs(self, workers: int) -> dict[str, int]:
        """Return the number of processes of each job of TF_CONFIG for a number of workers; the chief's job is first."""
        return {"worker": workers}

    def num_replicas_of(self, workers: int) -> int:
        """Return the number of replicas of a number of workers, as far as the settings give it."""
        return workers * (self.gpus_per_worker or 1)

    @property
    def gpus_per_worker(self) -> int | None:
        """The number of GPUs of each worker; None divides a machine's GPUs evenly among its workers."""
        return None


class MultiWorker(Cluster):
    """Synchronous copies in several processes, on one machine or many (tf.distribute.MultiWorkerMirroredStrategy)."""

    refuses: ClassVar[Mapping[str, str]] = COPIES_REFUSE
    kind: Course[Literal["multi_worker"]]
    devices: Course[Devices | None] = None
    """GPUs of each worker; null divides the machine's GPUs evenly, or uses the CPU if there are none."""
    communication: Speed[Literal["auto", "ring", "nccl"]] = "auto"
    """How the workers sum gradients: RING over gRPC, NCCL between GPUs; `auto` lets TensorFlow choose."""

    @property
    def gpus_per_worker(self) -> int | None:
        return self.devices

    @property
    def required_gpus(self) -> int | None:
        return self.devices


class ParameterServer(Cluster):
    """Asynchronous workers, whose variables are on servers (tf.distribute.ParameterServerStrategy)."""

    chief_gives_work: ClassVar[bool] = True
    loops: ClassVar[tuple[str, ...]] = ("custom",)
    refuses: ClassVar[Mapping[str, str]] = {
        "train.jit_compile": "a step reads and writes variables on other processes, which XLA cannot do",
        "train.gradient_accumulation_steps": "workers would add to and reset one accumulator at the same time",
        "train.dtype_policy=mixed_float16": "workers would change one loss scale at the same time",
        "train.deterministic": "workers are asynchronous: the order of their updates differs from run to run",
        "input.source=stream": "a worker gathers the rows that the coordinator names: set input.source=array",
    }
    kind: Course[Literal["parameter_server"]]
    ps: Speed[Devices] = 1
    """Number of processes that hold the variables."""

    def jobs(self, workers: int) -> dict[str, int]:
        return {"chief": 1, "worker": workers, "ps": self.ps}

    def num_replicas_of(self, workers: int) -> int:
        return 1  # Each worker takes its own steps.


class Tpu(StrategySection):
    """Synchronous copies on the cores of a TPU (tf.distribute.TPUStrategy)."""

    refuses: ClassVar[Mapping[str, str]] = {
        "train.dtype_policy=mixed_float16": "a TPU computes in bfloat16: set train.dtype_policy=mixed_bfloat16",
        "train.dtype_policy=float64": "a TPU has no float64",
        "train.gradient_accumulation_steps": NO_ACCUMULATION,
    }
    kind: Course[Literal["tpu"]]
    tpu: Speed[Text | None] = None
    """Name or address of the TPU, or `local` for a TPU of this machine; null uses TPU_NAME."""


MeshAxis = Annotated[str, Field(pattern=MESH_AXIS, max_length=50)]


class OnJax(Cluster):
    """Shared by the strategies on JAX: one process, or several that are one program (jax.distributed)."""

    backend: ClassVar[Literal["tensorflow", "jax"]] = "jax"
    unit: ClassVar[str] = "device"
    workers: Course[Devices] = 1
    """Number of processes that train together, each on its own devices. If someone else starts them, the number must be
    the same."""

    @property
    def cluster(self) -> Cluster | None:
        return self if self.workers > 1 else None

    @property
    def gpus_per_worker(self) -> int | None:
        return self.wanted_devices if isinstance(self.wanted_devices, int) else None

    @model_validator(mode="after")
    def cluster_agrees(self) -> Self:
        if self.workers == 1 and self.launcher not in (None, "local"):
            raise ValueError(
                f"launcher = '{self.launcher}' starts several processes, but workers = 1: set strategy.workers=N, the "
                "number of processes"
            )
        if self.workers > 1 and isinstance(self.wanted_devices, list):
            raise ValueError(
                f"devices = {self.wanted_devices} names devices of one process, but workers = {self.workers}: set the "
                "number of devices that each has"
            )
        return self


class DataParallel(OnJax):
    """Synchronous copies on the devices of one process or of several (keras.distribution.DataParallel on JAX)."""

    kind: Course[Literal["data_parallel"]]
    devices: Course[Devices | Annotated[list[Annotated[str, Field(pattern=DEVICE)]], Field(min_length=1)] | None] = None
    """Number of replicas of each worker, on accelerators or, if there are none, on forced CPU devices; or a list such
    as [gpu:0, gpu:2]. Null uses all devices of a machine and divides them evenly among its workers."""

    @property
    def wanted_devices(self) -> int | list[str] | None:
        return self.devices


class ModelParallel(OnJax):
    """Variables sharded by rules over a mesh of all workers' devices (keras.distribution.ModelParallel on JAX)."""

    exchange: ClassVar[str] = "passing shards between the devices"
    kind: Course[Literal["model_parallel"]]
    devices: Course[Devices | None] = None
    """Number of devices of each worker, on accelerators or, if there are none, on forced CPU devices. Null is what the
    mesh needs."""
    mesh_shape: Course[Annotated[list[Devices], Field(min_length=1, max_length=8)]] = [1, 1]
    """Number of devices along each axis; the product is the number of devices of all workers."""
    axis_names: Course[Annotated[list[MeshAxis], Field(min_length=1, max_length=8)]] = ["batch", "model"]
    """Names of the axes for `strategy.layout`; the first axis splits the batch."""
    layout: Course[Annotated[dict[Text, list[MeshAxis | None]], Field(max_length=1000)]] = {}
    """Rules that assign a mesh axis to each dimension. A rule's key is a regular expression for the end of a path: of a
    variable (`d1/kernel: [null, model]`) or of a layer's output (`d2/output: [batch, null]`)."""
    unmatched_rules: Bookkeeping[Literal["refuse", "warn"]] = "refuse"
    """If a rule matches no variable and no output: `refuse` to train, or `warn`, for a layout that several models
    share."""

    @property
    def wanted_devices(self) -> int:
        return self.devices or math.prod(self.mesh_shape) // self.workers

    @staticmethod
    def expression_of(rule: str) -> str:
        """Return the expression for a whole path, as Keras matches it, that matches a rule at the path's end."""
        return f"(?:.*/)?(?:{rule})"

    @model_validator(mode="after")
    def mesh_agrees(self) -> Self:
        if len(self.mesh_shape) != len(self.axis_names) or len(set(self.axis_names)) != len(self.axis_names):
            raise ValueError(
                f"mesh_shape = {self.mesh_shape} has {len(self.mesh_shape)} axes and axis_names = {self.axis_names} "
                f"names {len(set(self.axis_names))}: give each axis its own name"
            )
        if self.min_workers is not None:
            raise ValueError(
                f"min_workers = {self.min_workers}: mesh_shape = {self.mesh_shape} needs the devices of all workers. "
                "Set it to null"
            )
        if (product := math.prod(self.mesh_shape)) != self.wanted_devices * self.workers:
            sizes = " * ".join(map(str, self.mesh_shape))
            raise ValueError(
                f"mesh_shape = {self.mesh_shape} needs {sizes} = {product} devices, but workers = {self.workers} with "
                f"devices = {self.wanted_devices} have {self.workers * self.wanted_devices}: make them equal"
            )
        for rule, axes in self.layout.items():
            try:
                re.compile(self.expression_of(rule))
            except re.error as error:
                raise ValueError(
                    f"layout has the rule '{rule}', which is not a regular expression ({error}): write one for "
                    "the end of a path, such as .*kernel"
                ) from None
            for axis in axes:
                if axis is not None and axis not in self.axis_names:
                    raise ValueError(
                        f"layout has the rule '{rule}', which names the axis '{axis}': use null, or an axis of the "
                        f"mesh: {', '.join(self.axis_names)}"
                    )
        return self


AnyCluster = MultiWorker | ParameterServer | DataParallel | ModelParallel
AnyStrategy = OneDevice | Mirrored | MultiWorker | ParameterServer | Tpu | DataParallel | ModelParallel


def strategy_kinds() -> dict[str, type[StrategySection]]:
    """Return the classes of the strategies' sections, by kind."""
    return {get_args(section.model_fields["kind"].annotation)[0]: section for section in get_args(AnyStrategy)}
