"""Search over all completions of a run."""
