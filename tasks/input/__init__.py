"""From prepared data to batches: which examples, in which order, cut into which pieces.

The order of a pass over the data is a function of (seed, pass) alone, and the position in it is one integer, the step.
So a resumed run reads what the killed one would have read, and worker i of n computes its part without talking to the
others. Rows and augmentation are drawn in NumPy for every backend; only what reads with TensorFlow imports it.
"""
