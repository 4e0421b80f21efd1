"""Rollout engines: what samples completions, in the training processes or on servers."""
