"""`input.service=local` in real commands: the same bits as without it, also where the service is killed meanwhile."""

import signal

import pytest

from tests.processes.trainings import LAYOUTS, SAME, newest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(
    "layout", [pytest.param("one_device fit", marks=pytest.mark.exhaustive), "multi_worker custom"]
)
def test_a_training_has_the_bits_of_one_without_the_service_and_outlives_it(stratagem, whole, layout):
    options = (*LAYOUTS[layout], "input.augmentation={flip: true, crop_padding: 1}")
    training = stratagem("train", *SAME, *options, "input.service=local", "train.epochs=6", options=("--fresh",))
    training.wait_until(lambda: "strategy " in training.err.read_text())
    (service,) = training.members("input_service")
    # As servers of a cluster: in a network that has no other interface, so no one else reaches their ports.
    assert training.reached_by() == (set(), {"lo"})
    training.wait_until(lambda: newest(training) >= 20)
    service.send_signal(signal.SIGKILL)
    assert training.end() == 0, training.err.read_text()
    assert "nobody answers at grpc://127.0.0.1" in training.err.read_text()
    assert "Traceback" not in training.err.read_text()
    assert training.survivors() == []
    assert training.result["weights_digest"] == whole(*options, "train.epochs=6")
