"""A step's sequences to micro-batches: which ones come together, and their tensors."""

from cohort.packing.micro_batches import collate, collate_part, collate_prompt, pack

__all__ = ["collate", "collate_part", "collate_prompt", "pack"]
