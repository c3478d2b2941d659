"""Imports of a framework, without its start-up lines and without packages that it would import for nothing."""

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
    """Hold back what is written to descriptor 2, and write it only if the block fails for a reason that it may explain.

    TensorFlow's C++ start-up lines ignore TF_CPP_MIN_LOG_LEVEL.
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
    """Import what a stage needs, with a framework's start-up lines held back, and set who may log."""
    on_tensorflow = os.environ.get("KERAS_BACKEND", "tensorflow") == "tensorflow"
    left_out = ("matplotlib", "sklearn", "jax") if on_tensorflow else ("matplotlib", "sklearn")
    with quiet_standard_error(), without_collections():
        with upstream.importing_without(*left_out):
            if on_tensorflow:
                import tensorflow as tf
            for module in modules:
                importlib.import_module(module)
        if on_tensorflow:
            tf.config.list_physical_devices()  # Looks for a GPU, and says so at length when there is none.
    set_who_logs()


def devices_of_tensorflow() -> list[str]:
    """Return the names of the devices that TensorFlow sees."""
    import tensorflow as tf

    return [device.name for device in tf.config.list_physical_devices()]


def set_who_logs() -> None:
    """Let errors of all, and what the project itself tells, go to standard error, a line each."""
    from rich.console import Console
    from rich.highlighter import NullHighlighter
    from rich.logging import RichHandler

    # Lines end at a word where the terminal ends.
    console = Console(stderr=True, highlight=False)
    plain = RichHandler(
        console=console, show_time=False, show_level=False, show_path=False, highlighter=NullHighlighter()
    )
    logging.basicConfig(level=logging.ERROR, format="%(message)s", handlers=[plain], force=True)
    logging.getLogger("tasks").setLevel(logging.INFO)
    # It has a handler of its own, and tells of each error that it raises at length, with SQL.
    logging.getLogger("mlflow").setLevel(logging.ERROR if os.environ.get("STRATAGEM_DEBUG") else logging.CRITICAL)
