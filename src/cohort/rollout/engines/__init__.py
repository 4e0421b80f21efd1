"""Rollout engines, which sample completions in the training processes or on servers."""
