"""How fast a GPU computes and reads: the makers' data sheets or what was measured, and the share that is reached.

The shares are assumptions, that of computing the same as in docs/scaling.md: 40 % of the maker's peak and 60 % of his
bandwidth, or 60 % and 80 % of what was measured (`cohort.plan.calibration`).
"""

from dataclasses import dataclass

from cohort.plan.flops import memory_bandwidth, peak_flops
from cohort.plan.hardware import Hardware

_SHARE_OF_PEAK = 0.4
_SHARE_OF_BANDWIDTH = 0.6
_SHARE_OF_MEASURED = 0.6  # of what a product alone has reached
_SHARE_OF_MEASURED_BANDWIDTH = 0.8
USUAL_GPU = "NVIDIA H100 80GB HBM3"  # stands in for one that is not known here


@dataclass(frozen=True, slots=True)
class Rate:
    """A speed of one GPU, and the share of it that is taken to be reached."""

    best: float  # per second
    share: float
    is_measured: bool

    @property
    def used(self) -> float:
        """What is reckoned with."""
        return self.best * self.share


def computing_rate(hardware: Hardware, dtype: str) -> Rate:
    """Operations of matrix products in `dtype`; of a GPU that is not known, those of the usual one."""
    if hardware.measured is not None:
        flops = hardware.measured.flops
        return Rate(flops.get(dtype, flops["float32"] / 2), _SHARE_OF_MEASURED, True)  # float64 is not measured
    peak = peak_flops(hardware.gpu_name, dtype) or peak_flops(USUAL_GPU, dtype) or peak_flops(USUAL_GPU, "float32")
    assert peak is not None
    return Rate(peak, _SHARE_OF_PEAK, False)


def reading_rate(hardware: Hardware) -> Rate:
    """Bytes from memory; of a GPU that is not known, those of the usual one."""
    if hardware.measured is not None:
        return Rate(hardware.measured.memory_bandwidth, _SHARE_OF_MEASURED_BANDWIDTH, True)
    bandwidth = memory_bandwidth(hardware.gpu_name) or memory_bandwidth(USUAL_GPU)
    assert bandwidth is not None
    return Rate(bandwidth, _SHARE_OF_BANDWIDTH, False)
