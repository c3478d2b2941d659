"""LiteRT (once TensorFlow Lite), for phones and small devices."""

from tasks.exports import litert_format

FORMAT = litert_format(dict)
