"""What a training would do on many machines."""

from tasks.records.record import Record


class Pace(Record):
    """What one device takes for a step, and a training for a checkpoint, on this machine."""

    parameters: int
    """That are trained."""
    examples: int
    """In a step."""
    step_seconds: tuple[float, ...]
    """Of each call, by the steps in it."""
    checkpoint_seconds: float
    """What the training waits; the file is written beside it."""
    device: str


class ScalingPlan(Record):
    """What `stratagem plan` predicts; each range is what it may be as well."""

    workers: int
    devices: int
    """Of each worker."""
    communication: str
    """`ring`: TensorFlow's over gRPC, as measured; `nccl`: a ring by the textbook."""
    bandwidth: float
    """Bits a second."""
    latency_seconds: float
    parameters: int
    gradient_bytes: int
    global_batch_size: int
    step_seconds: float
    step_seconds_range: tuple[float, float]
    parts_seconds: dict[str, float]
    """Of a step: `computing`, `bandwidth`, `latency`, `software`."""
    bottleneck: str
    """The largest of the parts."""
    examples_per_second: float
    examples_per_second_range: tuple[float, float]
    efficiency: float
    """The share of a step that computes."""
    efficiency_range: tuple[float, float]
    failures_a_day: float | None = None
    """Of all machines together; null without a time between failures, as the restart and the goodputs are."""
    checkpoint_seconds: float | None = None
    """What a training waits for one; null where it is neither given nor measured."""
    restart_seconds: float | None = None
    interval_seconds: float | None = None
    """Between two checkpoints of the settings; null where these do not say it in steps, or a checkpoint's cost is
    not known."""
    checkpoint_share: float | None = None
    """The share of the time in which nothing fails that a training waits for checkpoints, with that interval."""
    checkpoint_share_range: tuple[float, float] | None = None
    goodput: float | None = None
    """The share of all time whose steps count in the end, with that interval."""
    goodput_range: tuple[float, float] | None = None
    """With half and twice the time between failures, and with the range of the step where the interval is in steps."""
    best_interval_seconds: float | None = None
    best_goodput: float | None = None
    best_goodput_range: tuple[float, float] | None = None
