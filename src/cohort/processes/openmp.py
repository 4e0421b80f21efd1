"""Makes OpenMP threads sleep while they wait. Imported with `cohort`: torch reads the setting when it is imported.

If they spin, training is several times slower when another program uses the same cores.
"""

import os
import sys

# True if torch was imported first and has already read the environment
spins = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
