"""Imports frameworks without their start-up messages and without packages that they import needlessly."""

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator

from tasks.system import upstream
from tasks.system.errors import StratagemError
from tasks.system.machine import without_collections


@contextlib.contextmanager
def quiet_standard_error() -> Iterator[None]:
    """Hold back the output to descriptor 2, and write it only if the block fails for a reason that it may explain.

    TensorFlow's C++ start-up messages ignore TF_CPP_MIN_LOG_LEVEL.
    """
    with tempfile.TemporaryFile() as held:
        visible = os.dup(2)
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as error:
            os.dup2(visible, 2)
            held.seek(0)
            # A refusal is one message.
            if not isinstance(error, StratagemError) or os.environ.get("STRATAGEM_DEBUG"):
                sys.stderr.write(held.read().decode(errors="replace"))
            raise
        finally:
            os.dup2(visible, 2)
            os.close(visible)


def import_quietly(*modules: str) -> None:
    """Import modules of a stage without a framework's start-up messages, and configure logging."""
    on_tensorflow = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    left_out = ("matplotlib", "sklearn", "jax") if on_tensorflow else ("matplotlib", "sklearn")
    with quiet_standard_error(), without_collections():
        with upstream.importing_without(*left_out):
            if on_tensorflow:
                import tensorflow as tf
            for module in modules:
                importlib.import_module(module)
        if on_tensorflow:
            tf.config.list_physical_devices()  # Without a GPU, the first call prints several lines.
    set_who_logs()


def devices_of_tensorflow() -> list[str]:
    """Return the names of the devices that TensorFlow sees."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_physical_devices()]


def set_who_logs() -> None:
    """Log the errors of all packages, and the project's own information, to standard error, one line each."""
    from rich.console import Console
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    console = Console(stderr=True)  # Wraps lines at words.
    plain = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, highlighter=NullHighlighter()
    )
    logging.basicConfig(level=logging.ERROR, format="%(message)s", handlers=[plain], force=True)
    logging.getLogger("tasks").setLevel(logging.INFO)
    # MLflow has its own handler, and logs each error that it raises at length, with SQL.
    logging.getLogger("mlflow").setLevel(logging.ERROR if os.environ.get("STRATAGEM_DEBUG") else logging.CRITICAL)
