"""Run code of completions where it can do no harm.

`open_sandbox` picks a backend whose protections hold on this machine. A job runs the program `guest.py` in a fresh
process in there; expected results never enter, and what comes back is data from an untrusted source.
"""

from cohort.sandbox.choose import SharedSandbox, open_sandbox
from cohort.sandbox.pool import Job, JobResult, Sandbox

__all__ = ["Job", "JobResult", "Sandbox", "SharedSandbox", "open_sandbox"]
