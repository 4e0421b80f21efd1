"""Attention over packed rows with shared prefixes."""

from cohort.policy.attention.interface import NAME, KVCache

__all__ = ["NAME", "KVCache"]
