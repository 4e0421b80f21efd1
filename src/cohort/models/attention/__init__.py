"""Attention over packed rows with shared prefixes."""

from cohort.models.attention.interface import NAME, KVCache

__all__ = ["NAME", "KVCache"]
