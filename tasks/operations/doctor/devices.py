"""Cores, GPUs and TPUs, and which strategies they allow."""

from collections.abc import Iterator, Sequence

from tasks import config
from tasks.operations import preconditions
from tasks.operations.doctor import Here, Remark
from tasks.process.child import run_stage
from tasks.system import machine
from tasks.system.errors import StratagemError, UserError


def look(here: Here) -> Iterator[Remark]:
    """Yield what there is, which strategies cannot be used here and why, and whether that of params.yaml can."""
    cores, gpus = machine.usable_cores(), machine.visible_gpus()
    yield Remark("ok", f"{cores} processor core{'s' * (cores != 1)}, {machine.gpus_in_words(gpus)}")
    try:
        settings = config.load(root=here.root)
    except UserError:
        return  # `settings` tells.
    own = settings.strategy.kind
    refused: dict[str, str] = {}
    for kind, section in config.strategy_kinds().items():
        values = {} if kind == own else {"strategy.kind": kind, "train.loop": section.loops[0]}
        try:
            preconditions.check_devices(config.load(overrides=values, root=here.root))
        except UserError as error:
            refused[kind] = str(error)
    allowed = [kind for kind in config.strategy_kinds() if kind not in refused]
    yield Remark("ok", f"strategies that can be used here: {', '.join(allowed) or 'none'}")
    for kind, reason in refused.items():
        if kind == own:
            yield Remark("error", f"params.yaml asks for {reason}", "stratagem run --set strategy.kind=one_device")
        else:
            yield Remark("ok", f"not here: {kind} ({reason.partition('. ')[0]})")
    if here.with_devices:
        yield from _ask_tensorflow(gpus)


def _ask_tensorflow(gpus: Sequence[str]) -> Iterator[Remark]:
    try:
        seen = run_stage("devices").split()
    except StratagemError as error:
        yield Remark("error", f"TensorFlow cannot be imported: {error}", "make setup")
        return
    of_tensorflow = sum("GPU" in name for name in seen)
    if of_tensorflow < len(gpus):
        there = machine.gpus_in_words(gpus)
        text = f"the driver has {there}, and TensorFlow sees {of_tensorflow}: it trains on the processor"
        yield Remark("error", text, "pip install 'tensorflow[and-cuda]', or the driver of its CUDA version: nvidia-smi")
    else:
        yield Remark("ok", f"TensorFlow sees {', '.join(seen) or 'no device'}")
