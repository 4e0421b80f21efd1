"""Training: setup of a run, the training loop, and the workers."""
