"""Achievable FLOP/s and bandwidth of a GPU, from data sheets or measurements.

Assumed utilization, as in docs/scaling.md: 40 % of peak FLOP/s and 60 % of peak bandwidth by data sheet, 60 % and 80 %
of measured values (`cohort.plan.calibration`). An unmeasured host-to-GPU bus is assumed to be PCIe 4.0 x16.
"""

from dataclasses import dataclass
from typing import Literal

from cohort.plan.hardware import Hardware, memory_bandwidth, peak_flops

_PEAK_UTILIZATION = 0.4
_BANDWIDTH_UTILIZATION = 0.6
_MEASURED_UTILIZATION = 0.6  # of an isolated matmul's FLOP/s
_MEASURED_BANDWIDTH_UTILIZATION = 0.8
_PCIE4_BANDWIDTH = 25e9  # bytes/s in practice, of PCIe 4.0 x16's 32e9 one way
_DATA_SHEET = "data sheet"
DEFAULT_GPU = "NVIDIA H100 80GB HBM3"  # stands in for an unknown GPU


@dataclass(frozen=True, slots=True)
class Rate:
    """Peak rate of one GPU and its assumed utilization."""

    peak: float  # per second
    utilization: float
    origin: Literal["measured", "assumed"]
    source: str  # of the peak, in words

    @property
    def achieved(self) -> float:
        """Rate that predictions use."""
        return self.peak * self.utilization


def compute_rate(hardware: Hardware, dtype: str) -> Rate:
    """Matmul FLOP/s in `dtype`; for an unknown GPU those of `DEFAULT_GPU`."""
    if (measured := hardware.calibration) is not None:
        flops = measured.flops.get(dtype, measured.flops["float32"] / 2)  # float64 is not measured
        return Rate(flops, _MEASURED_UTILIZATION, "measured", measured.describe())
    peak = peak_flops(hardware.gpu_name, dtype) or peak_flops(DEFAULT_GPU, dtype) or peak_flops(DEFAULT_GPU, "float32")
    assert peak is not None
    return Rate(peak, _PEAK_UTILIZATION, "assumed", _DATA_SHEET)


def memory_rate(hardware: Hardware) -> Rate:
    """Memory bandwidth in bytes/s; for an unknown GPU that of `DEFAULT_GPU`."""
    if (measured := hardware.calibration) is not None:
        return Rate(measured.memory_bandwidth, _MEASURED_BANDWIDTH_UTILIZATION, "measured", measured.describe())
    bandwidth = memory_bandwidth(hardware.gpu_name) or memory_bandwidth(DEFAULT_GPU)
    assert bandwidth is not None
    return Rate(bandwidth, _BANDWIDTH_UTILIZATION, "assumed", _DATA_SHEET)


def bus_rate(hardware: Hardware) -> Rate:
    """Bandwidth between host and GPU in bytes/s, one way; PCIe 4.0 x16 if unmeasured."""
    measured = hardware.calibration
    if measured is not None and measured.host_bandwidth is not None:
        return Rate(measured.host_bandwidth, 1.0, "measured", measured.describe())
    return Rate(_PCIE4_BANDWIDTH, 1.0, "assumed", "typical of PCIe 4.0 x16")
