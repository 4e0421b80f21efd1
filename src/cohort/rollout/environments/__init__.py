"""Environments: programs that roll out one member of a group with the model of its trajectory."""
