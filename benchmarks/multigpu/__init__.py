"""Parts of ``benchmarks/several_gpus.py``: teams of ranks, what they run, what is reported."""

import time

START = time.monotonic()
"""Before the imports that take long."""
