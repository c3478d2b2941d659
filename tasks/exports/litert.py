"""LiteRT (once TensorFlow Lite), by Keras, for phones and small devices."""

from tasks.exports import Format, load_litert

NAME = "model.tflite"
NOT_IN_IT = "its multiplications would be TensorFlow's own operations, which LiteRT's runtime does not have"

FORMAT = Format(
    write=lambda model, keras_file, folder: model.export(folder / NAME, format="litert", verbose=False),
    load=lambda folder: load_litert(folder / NAME),
    packages=("ai_edge_litert",),
    refuses=dict.fromkeys(("mixed_float16", "mixed_bfloat16", "float64"), NOT_IN_IT),
)
