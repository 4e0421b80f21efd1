"""An OpenAI-compatible endpoint in front of the rollout engine, for agents as they are."""
