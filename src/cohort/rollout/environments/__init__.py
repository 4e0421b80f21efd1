"""Environments: coroutines that roll out one member of a group with an engine's `generate`."""
