"""Before torch is imported: waiting threads must sleep and not spin, or a busy machine slows them several times."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
