"""Files that vLLM servers load from this folder; Cohort is not installed there."""
