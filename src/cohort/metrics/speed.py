"""How fast a model was trained, and what share of the hardware that is."""

from typing import Any

import torch

from cohort.plan.flops import ModelFlops, model_flops, peak_flops


def flops_of(model: Any) -> ModelFlops:
    """The costs of a loaded Hugging Face model; of a sharded one, those of the whole."""
    # of 4-bit weights the parameter is two numbers a byte, in one column; its state has the shape of the weight
    parameters = (
        (name, tuple(getattr(getattr(p, "quant_state", p), "shape", p.shape)), p.requires_grad)
        for name, p in model.named_parameters()
    )
    return model_flops(parameters, model.config.get_text_config().to_dict())


def device_peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Operations per second that a device does at its best in `dtype`; None on a CPU and on a GPU not known here."""
    if device.type != "cuda":
        return None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    return peak_flops(torch.cuda.get_device_name(device), str(dtype).removeprefix("torch."), tf32=tf32)


def speed_metrics(flops: float, *, seconds: float, num_processes: int, peak: float | None) -> dict[str, float]:
    """`model_tflops_per_second` of each process and, where the peak is known, the share of it, `mfu`.

    Args:
        flops: that the step's training asked for, over all processes.
        seconds: that it took.
        num_processes: each with a device of its own.
        peak: of one device, in operations per second.
    """
    speed = flops / seconds / num_processes
    return {"model_tflops_per_second": speed / 1e12} | ({"mfu": speed / peak} if peak else {})
