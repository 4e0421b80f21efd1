"""Before torch is imported: threads that wait for each other must not spin, or a busy machine slows them 10 times."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
