"""Commands: one module per verb over the offline and asynchronous engines."""

import time

PROCESS_START = time.perf_counter()  # as early as Python lets us; what ``startup_s`` counts from
