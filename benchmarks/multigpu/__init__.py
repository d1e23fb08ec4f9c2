"""Parts of ``benchmarks/several_gpus.py``: teams of ranks, what they run, what is reported."""
