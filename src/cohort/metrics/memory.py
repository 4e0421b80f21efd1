"""Peak memory of this process."""

import resource
import sys

import torch


def peak_memory_bytes(device: torch.device) -> int:
    """On CUDA the most the allocator has held; elsewhere the process's peak resident set. Both since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
