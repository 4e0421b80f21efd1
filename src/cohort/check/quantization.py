"""Quantized weights as other trainers ask for them, through bitsandbytes: for conversion and memory."""

from collections.abc import Mapping

from cohort.check.launch import Settings
from cohort.config.quantization import Quantization

# what `model.quantization` calls so many bits
COHORT_NAMES: Mapping[int, Quantization] = {4: "nf4", 8: "int8"}


def told(bits: int) -> str:
    """In words."""
    return f"weights of {bits} bits by bitsandbytes"


def trl_bits(settings: Settings) -> int | None:
    """Of a TRL or Open-R1 run; None: not quantized. Python's `BitsAndBytesConfig` counts with the trainer's model."""
    for bits in (4, 8):
        if settings.flag(f"load_in_{bits}bit") or settings.flag(f"trainer.load_in_{bits}bit"):
            return bits
    return None


def swift_bits(settings: Settings) -> int | None:
    """Of an ms-swift run; None: not quantized by bitsandbytes."""
    if settings.text("quant_method") != "bnb":
        return None
    bits = settings.whole("quant_bits", 4)
    return bits if bits in (4, 8) else None
