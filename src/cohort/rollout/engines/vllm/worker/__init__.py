"""What a vLLM server loads, from this folder alone: Cohort is not installed there."""
