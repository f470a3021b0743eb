"""How long tests wait for what ends by itself, unless it is broken."""

import os

PATIENCE = float(os.environ.get("FASTVIT_PATIENCE", "1"))  # a factor, for machines on which waiting fails tests
HANG = 1200.0 * PATIENCE  # seconds after which a process or a thread counts as hanging
