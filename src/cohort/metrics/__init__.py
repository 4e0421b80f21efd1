"""Metrics of a step and their loggers. Names are TRL's where the meaning is the same."""
