"""Attention over packed rows with shared prefixes."""

from cohort.models.attention.interface import NAME, KVCache, PackedAttention

__all__ = ["NAME", "KVCache", "PackedAttention"]
