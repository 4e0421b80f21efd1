"""The `local` rollout engine: the training processes sample."""
