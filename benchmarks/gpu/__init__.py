"""Parts of the check on a chip, each a process of its own (benchmarks/gpu_check.py starts them)."""
