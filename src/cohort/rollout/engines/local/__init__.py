"""The `local` rollout engine: sample in the training processes."""
