"""The vLLM-specific parts of the `vllm` rollout engine."""
