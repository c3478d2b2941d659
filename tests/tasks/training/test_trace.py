import pytest
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from tasks.training import trace as traced


def write_trace(path, planes):
    """Write a trace: plane -> line -> (name, begin ms, end ms, stats)."""
    space = xplane_pb2.XSpace()
    for plane_name, lines in planes.items():
        plane = space.planes.add(name=plane_name)
        for line_name, events in lines.items():
            line = plane.lines.add(name=line_name)
            for name, begin, end, stats in events:
                number = len(plane.event_metadata) + 1
                plane.event_metadata[number].id, plane.event_metadata[number].name = number, name
                event = line.events.add(metadata_id=number, offset_ps=round(begin * 1e9))
                event.duration_ps = round((end - begin) * 1e9)
                for key, value in stats.items():
                    number = len(plane.stat_metadata) + 1
                    plane.stat_metadata[number].id, plane.stat_metadata[number].name = number, key
                    event.stats.add(metadata_id=number, int64_value=value)
    path.write_bytes(space.SerializeToString())
    return path


def call(begin, end, **stats):
    return ("train", begin, end, stats)


def at(name, begin, end, **stats):
    return (name, begin, end, stats)


OPERATION = "StatefulPartitionedCall/model/dense/MatMul:MatMul"
NEXT = "IteratorGetNextOp::DoCompute"
# Each row: the trace, the steps in it, and what a step's time went into in ms, added up by hand.
TRACES = {
    "the wait, then the step, then Python": (
        {"/host:CPU": {
            "python": [call(0, 10, epoch=0), call(12, 20, epoch=0), at("EagerExecute", 0, 20)],
            "tf_data_iterator_get_next/1": [at(NEXT, 1, 3), at(NEXT, 12, 15)],
            "tf_Compute/1": [at(OPERATION, 3, 8), at(OPERATION, 15, 19), at("ExecutorState::Process", 0, 20)],
        }},
        2, (9, 0, 5, 6),
    ),
    "two threads compute at once, and beside a wait; a wait of two replicas is one": (
        {"/host:CPU": {
            "python": [call(0, 20, epoch=0)],
            "tf_data_iterator_get_next/1": [at("IteratorGetNextAsOptionalOp::DoCompute", 0, 6)],
            "tf_data_iterator_get_next/2": [at(NEXT, 2, 8)],
            "tf_Compute/1": [at(OPERATION, 7, 12)],
            "tf_Compute/2": [at(OPERATION, 10, 15)],
        }},
        1, (8, 0, 7, 5),
    ),
    "the input pipeline's own work is nothing, and a collective that waits for the others does not compute": (
        {"/host:CPU": {
            "python": [call(0, 10, epoch=0)],
            "tf_data_private_threadpool/1": [at("PyFunc:PyFunc", 0, 9)],
            "collective_ops/1": [at("adam/CollectiveReduceV2:CollectiveReduceV2", 4, 9)],
            "tf_Compute/1": [at(OPERATION, 2, 4), at("adam/CollectiveReduceV2:CollectiveReduceV2", 5, 6)],
        }},
        1, (2, 5, 0, 3),
    ),
    "what comes between two epochs is left out": (
        {"/host:CPU": {
            "python": [call(900, 910, epoch=0), call(950, 960, epoch=1)],
            "tf_Compute/1": [at(OPERATION, 0, 905), at(OPERATION, 910, 952)],
        }},
        2, (7, 0, 0, 13),
    ),
    "a GPU computes, not the threads that launch; NCCL is a collective, and a copy beside the wait is the wait": (
        {"/host:CPU": {
            "python": [call(0, 20, epoch=0)],
            "tf_data_iterator_get_next/1": [at(NEXT, 0, 8)],
            "tf_Compute/1": [at(OPERATION, 0, 20)],
        }, "/device:GPU:0": {
            "Stream #13(Compute)": [at("sgemm_128x128", 2, 10), at("ncclDevKernel_AllReduce_Sum_f32", 10, 14)],
            "Stream #14(MemcpyH2D)": [at("MemcpyH2D", 0, 2)],
        }},
        1, (8, 4, 2, 6),
    ),
    "JAX: the wait is marked, operations name their HLO, and a sum beside them is theirs": (
        {"/host:CPU": {
            "python": [call(0, 20, epoch=0), at("input_wait", 0, 6), at("PjitFunction(train_step)", 6, 20)],
            "tf_XLAPjRtCpuClient/1": [at("dot", 8, 12, hlo_op=1), at("all-reduce.3", 12, 18, hlo_op=1),
                                      at("ThunkExecutor::Execute", 6, 20)],
            "tf_XLAEigen/1": [at("fusion.1", 11, 14, hlo_op=1)],
        }},
        1, (6, 4, 6, 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("planes", "num_steps", "expected"), TRACES.values(), ids=TRACES.keys())
def test_the_split_of_a_trace_made_by_hand(tmp_path, planes, num_steps, expected):
    parts = traced.split(write_trace(tmp_path / "made.xplane.pb", planes), num_steps)
    per_step = [milliseconds / num_steps for milliseconds in expected]
    assert list(parts) == ["compute", "collectives", "input_wait", "host"]
    assert list(parts.values()) == pytest.approx(per_step)
