"""The `object` rollout engine: an object of the user's own, given as `cohort.Trainer(engine=...)`."""
