"""Runs a schedule over the ranks of a pipeline, on the user's own module. Knows no trainer."""
