"""The sum of a linear model and a perceptron on embeddings (Cheng et al., "Wide & Deep Learning for Recommender
Systems", 2016, section 3), for numbers and categories. Add the paper's crossed columns to your table."""

from collections.abc import Mapping, Sequence

import keras

from tasks.modeling.models._layers import dropped, embed_categories, inputs_of, output_layer
from tasks.records import Feature, as_input


def build(
    features: Mapping[str, Feature],
    num_outputs: int,
    units: Sequence[int] = (128, 64),
    embedding: int = 32,
    dropout: float = 0.0,
) -> keras.Model:
    """Return features by name -> outputs (batch, num_outputs), of the policy's variable dtype.

    The paper uses ``units`` of 1024, 512 and 256 for 500 billion examples.

    Raises:
        ValueError: a feature is neither numbers nor categories.
    """
    if others := [name for name, feature in features.items() if feature.kind not in ("number", "category")]:
        raise ValueError(f"takes only numbers and categories, not {', '.join(others)}: set model.name=mixed")
    inputs = inputs_of(features)
    wide, deep = [], []
    for name, feature in features.items():
        if feature.kind == "category":
            wide += embed_categories(inputs[name], feature, num_outputs, f"{name}_wide")
            deep += embed_categories(inputs[name], feature, embedding, f"{name}_deep")
        else:
            wide.append(output_layer(num_outputs, f"{name}_wide")(inputs[name]))
            deep.append(inputs[name])
    x = keras.layers.Concatenate(name="together")(deep) if len(deep) > 1 else deep[0]
    for place, width in enumerate(units, start=1):
        x = keras.layers.Dense(width, activation="relu", name=f"dense{place}")(x)
        x = dropped(x, dropout, f"dropout{place}")
    full = keras.config.dtype_policy().variable_dtype
    logits = keras.layers.Add(dtype=full, name="logits")([*wide, output_layer(num_outputs, "deep")(x)])
    return keras.Model(as_input(inputs), logits, name="wide_deep")
