"""Attention over the segments of packed rows."""

from cohort.policy.attention.interface import NAME, KeyValues

__all__ = ["NAME", "KeyValues"]
