"""How long tests wait for what ends by itself, unless it is broken."""

import os
import threading
from collections.abc import Callable

PATIENCE = float(os.environ.get("FASTVIT_PATIENCE", "1"))  # a factor, for machines on which waiting fails tests
HANG = 1200.0 * PATIENCE  # seconds after which a process or a thread counts as hanging


def run_in_threads(*calls: Callable[[], object]) -> None:
    """Runs functions at once, each in a thread of its own, and waits for them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
