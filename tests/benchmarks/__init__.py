"""What the running engine costs, measured on this machine; ``make bench`` or ``python -m tests.benchmarks``."""
