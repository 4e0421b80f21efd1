"""What this machine can do, and what is missing: `cohort doctor`, and its quick checks when a run fails to start."""

from cohort.doctor.checks import Finding, Status, examine, failed_checks, failed_checks_text

__all__ = ["Finding", "Status", "examine", "failed_checks", "failed_checks_text"]
