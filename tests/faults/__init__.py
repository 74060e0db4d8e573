"""Faults injected into small runs, and what must come of each: ``python -m tests.faults``."""
