"""Limits of one run in the sandbox."""

from dataclasses import dataclass

from cohort.config.sandbox import SandboxConfig
from cohort.config.sizes import parse_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run."""

    wall_s: float
    cpu_s: int  # per process
    memory_bytes: int  # of all processes; for Python also the address space of each
    max_processes: int
    max_file_bytes: int
    tmp_bytes: int
    max_open_files: int
    max_output_bytes: int

    @property
    def channel_bytes(self) -> int:
        """Bytes that the guest may answer with: a character of JSON takes up to 6, and each record has a frame."""
        return 6 * self.max_output_bytes + 65_536

    @staticmethod
    def of(config: SandboxConfig) -> "Limits":
        """Return the limits of a configuration."""
        return Limits(
            wall_s=config.wall_s,
            cpu_s=config.cpu_s,
            memory_bytes=parse_size(config.memory),
            max_processes=config.max_processes,
            max_file_bytes=parse_size(config.max_file_size),
            tmp_bytes=parse_size(config.tmp_size),
            max_open_files=config.max_open_files,
            max_output_bytes=parse_size(config.max_output),
        )

    def rlimits(self, *, counts_processes: bool, limits_addresses: bool) -> dict[str, int]:
        """Return the resource limits that the guest sets for itself.

        Args:
            counts_processes: whether the user's processes outside of the sandbox do not count, so that RLIMIT_NPROC
                is a limit for the sandbox alone.
            limits_addresses: whether to limit the address space. Runtimes such as Go's and Java's reserve far more
                than they use.
        """
        limits = {
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": self.cpu_s,
            "RLIMIT_FSIZE": self.max_file_bytes,
            "RLIMIT_NOFILE": self.max_open_files,
        }
        if counts_processes:
            limits["RLIMIT_NPROC"] = self.max_processes
        if limits_addresses:
            limits["RLIMIT_AS"] = self.memory_bytes
        return limits
