"""LiteRT (once TensorFlow Lite), for phones and small devices."""

from tasks.serving.formats._litert import litert_format

FORMAT = litert_format(dict)
