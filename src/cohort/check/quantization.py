"""Read bitsandbytes quantization settings of other trainers, for conversion and memory."""

from collections.abc import Mapping

from cohort.check.launch import Settings
from cohort.config.quantization import Quantization

# names of these numbers of bits in `model.quantization`
COHORT_NAMES: Mapping[int, Quantization] = {4: "nf4", 8: "int8"}


def describe_bits(bits: int) -> str:
    """Describe the quantization in a message."""
    return f"{bits}-bit weights by bitsandbytes"


def trl_bits(settings: Settings) -> int | None:
    """Return the bits of a TRL or Open-R1 run, also from Python's `BitsAndBytesConfig`; None if not quantized."""
    for bits in (4, 8):
        if settings.flag(f"load_in_{bits}bit") or settings.flag(f"trainer.load_in_{bits}bit"):
            return bits
    return None


def swift_bits(settings: Settings) -> int | None:
    """Return the bits of an ms-swift run; None if not quantized by bitsandbytes."""
    if settings.text("quant_method") != "bnb":
        return None
    bits = settings.whole("quant_bits", 4)
    return bits if bits in (4, 8) else None
