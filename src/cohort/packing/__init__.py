"""Pack sequences into micro-batches under a token budget, and build their tensors."""

from cohort.packing.micro_batches import collate, collate_part, collate_prompt, pack

__all__ = ["collate", "collate_part", "collate_prompt", "pack"]
