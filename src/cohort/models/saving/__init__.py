"""Save a policy as a model folder, and export its weights to rollout engines."""
