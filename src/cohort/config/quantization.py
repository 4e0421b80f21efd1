"""Frozen weights in fewer bits, as the `model` and the `reference` section name them."""

from typing import Literal

Quantization = Literal["nf4", "int8", "fp8"]
# For a person; docs/quantization.md has what each takes and costs.
KINDS = (
    "nf4: 4 bits, by bitsandbytes (arXiv:2305.14314); int8 and fp8: 8 bits, by torchao. Linear layers but the head; "
    "products are computed in the compute dtype with a copy of one weight at a time"
)
ONE_PROCESS = "works in one process: quantized weights are not spread over several; use hardware.processes: 1"
