"""Search over the completions of a run."""
