"""Processes besides the ranks, and what this one may use."""
