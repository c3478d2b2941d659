"""Raw examples for a trained model, a part at a time: what a person names (`reader`), tables by rules of their own
(`tables`), as what the model takes (`examples`).

What is broken is an example with the reason, so that the others have their predictions. Nothing is kept of what was
read before, however long a file is.
"""

from tasks.serving.raw_inputs.examples import RawExamples, Wanted
from tasks.serving.raw_inputs.reader import MAX_TEXT, Reader
