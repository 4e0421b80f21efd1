"""What this machine can do, and what is missing: `cohort doctor`, and its quick checks when a run fails to start."""

from cohort.doctor.checks import Finding, examine, failed_checks

__all__ = ["Finding", "examine", "failed_checks"]
