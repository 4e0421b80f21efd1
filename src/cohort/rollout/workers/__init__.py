"""Rollout workers: processes that run trajectories in event loops of their own."""
