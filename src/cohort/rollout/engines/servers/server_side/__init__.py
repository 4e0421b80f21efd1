"""Files that servers of any program load from this folder; Cohort is not installed there."""
