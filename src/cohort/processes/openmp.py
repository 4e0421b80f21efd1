"""How threads of OpenMP wait: decided when this is imported, which is before torch if cohort is.

They must sleep, not spin: with another program on the same cores, spinning makes training several times slower.
"""

import os
import sys

# whether torch, which reads the variable when it is imported, was faster
spins = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
