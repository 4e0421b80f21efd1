"""Training processes: how they join, talk, stop together and answer calls."""
