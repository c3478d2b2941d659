"""What a training is made of: its loops and steps, and the callbacks that are told of them."""
