"""A step's sequences to micro-batches: which ones come together, and their tensors."""

from cohort.packing.row import collate, collate_part, collate_prompt
from cohort.packing.split import pack

__all__ = ["collate", "collate_part", "collate_prompt", "pack"]
