"""How fast a GPU computes and reads: the makers' data sheets or what was measured, and the share that is reached.

The shares are assumptions, that of computing the same as in docs/scaling.md: 40 % of the maker's peak and 60 % of his
bandwidth, or 60 % and 80 % of what was measured (`cohort.plan.calibration`). How fast the bus between host and GPU is
depends on the machine: where it was not measured, copies are taken to be as fast as is usual of 16 lanes of PCIe 4.0.
"""

from dataclasses import dataclass

from cohort.plan.flops import memory_bandwidth, peak_flops
from cohort.plan.hardware import Hardware

_SHARE_OF_PEAK = 0.4
_SHARE_OF_BANDWIDTH = 0.6
_SHARE_OF_MEASURED = 0.6  # of what a product alone has reached
_SHARE_OF_MEASURED_BANDWIDTH = 0.8
_USUAL_BUS = 25e9  # bytes per second, of the 32e9 that 16 lanes of PCIe 4.0 have one way
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


def bus_rate(hardware: Hardware) -> Rate:
    """Bytes between host and GPU, one way; where that was not measured, of a usual bus."""
    if hardware.measured is not None and hardware.measured.host_bandwidth is not None:
        return Rate(hardware.measured.host_bandwidth, 1.0, True)
    return Rate(_USUAL_BUS, 1.0, False)
