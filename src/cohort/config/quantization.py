"""Quantization of frozen weights, in the `model` and `reference` sections."""

from typing import Literal

Quantization = Literal["nf4", "int8", "fp8"]
# Help text; see docs/quantization.md for memory and cost.
KINDS = (
    "nf4: 4 bits, by bitsandbytes (arXiv:2305.14314); int8 and fp8: 8 bits, by torchao. Linear layers except the LM "
    "head; each weight is dequantized to the compute dtype when used"
)
ONE_PROCESS = "needs a single process: quantized weights cannot be sharded; use hardware.processes: 1"


def check_base(kind: Quantization, *, has_adapter: bool, dtype: str) -> None:
    """Check `model.quantization` against the rest of its section.

    Raises:
        ValueError: the settings are incompatible.
    """
    if not has_adapter:
        raise ValueError(
            f"quantization: {kind} without adapter: quantized weights cannot be trained; add an adapter, such as "
            f"{{rank: 16}}, or remove quantization"
        )
    if dtype == "float64":
        raise ValueError(
            f"quantization: {kind} with dtype: float64: quantized weights compute in float32 or bfloat16; use one of "
            f"these"
        )


def check_run(field: str, kind: Quantization, *, processes: int | str, engine: str, shares_weights: bool) -> None:
    """Check a quantization key against the run's processes and rollout engine.

    Raises:
        ValueError: the settings are incompatible.
    """
    if processes not in (1, "auto"):
        raise ValueError(f"{field}: {kind} {ONE_PROCESS}; hardware.processes is {processes}")
    if field == "model.quantization" and not shares_weights:
        raise ValueError(
            f"{field}: {kind} with rollout.engine: {engine}: servers load the unquantized base model, and would sample "
            f"from a different policy than the trained one; use rollout.engine: local, or no quantization"
        )
