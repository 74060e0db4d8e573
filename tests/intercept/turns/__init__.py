"""Tests of runs in which the ranks take turns."""
