"""Environments: programs that roll out one trajectory of a group with the model of its trajectory."""
