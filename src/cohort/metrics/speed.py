"""Training throughput: FLOP/s and MFU."""

from typing import Any

import torch

from cohort.plan.flops import ModelFlops, model_flops
from cohort.plan.hardware import peak_flops


def flops_of(model: Any) -> ModelFlops:
    """FLOPs of a loaded Hugging Face model; if sharded, of the whole model."""
    # a 4-bit parameter packs two weights per byte in one column; its quant_state has the weight's shape
    parameters = (
        (name, tuple(getattr(getattr(p, "quant_state", p), "shape", p.shape)), p.requires_grad)
        for name, p in model.named_parameters()
    )
    return model_flops(parameters, model.config.get_text_config().to_dict())


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device in `dtype`; None for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."), tf32=tf32)


def speed_metrics(flops: float, *, seconds: float, num_processes: int, peak: float | None) -> dict[str, float]:
    """Compute `model_tflops_per_second` per process and, if the peak is known, `mfu`.

    Args:
        flops: model FLOPs of the step's training, over all processes.
        seconds: duration of the training.
        num_processes: number of processes, one device each.
        peak: peak FLOP/s of one device.
    """
    speed = flops / seconds / num_processes
    return {"model_tflops_per_second": speed / 1e12} | ({"mfu": speed / peak} if peak else {})
