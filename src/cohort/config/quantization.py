"""Frozen weights in fewer bits, as the `model` and the `reference` section name them."""

from typing import Literal

Quantization = Literal["nf4", "int8", "fp8"]
# For a person; docs/quantization.md has what each takes and costs.
KINDS = (
    "nf4: 4 bits, by bitsandbytes (arXiv:2305.14314); int8 and fp8: 8 bits, by torchao. Linear layers but the head; "
    "products are computed in the compute dtype with a copy of one weight at a time"
)
ONE_PROCESS = "works in one process: quantized weights are not spread over several; use hardware.processes: 1"


def check_base(kind: Quantization, *, has_adapter: bool, dtype: str) -> None:
    """Compare `model.quantization` with the rest of its section.

    Raises:
        ValueError: they do not go together.
    """
    if not has_adapter:
        raise ValueError(
            f"quantization: {kind} without adapter: weights in so few bits cannot be trained; add an adapter, such as "
            f"{{rank: 16}}, or remove quantization"
        )
    if dtype == "float64":
        raise ValueError(
            f"quantization: {kind} with dtype: float64: quantized weights are computed with in float32 or bfloat16; "
            f"use one of these"
        )


def check_run(field: str, kind: Quantization, *, processes: int | str, engine: str, shares_weights: bool) -> None:
    """Compare a key that asks for quantized weights with where the run trains and samples.

    Raises:
        ValueError: they do not go together.
    """
    if processes not in (1, "auto"):
        raise ValueError(f"{field}: {kind} {ONE_PROCESS}; hardware.processes is {processes}")
    if field == "model.quantization" and not shares_weights:
        raise ValueError(
            f"{field}: {kind} with rollout.engine: {engine}: servers load the base as its files have it, and would "
            f"sample from another policy than the one that is trained; use rollout.engine: local, or no quantization"
        )
