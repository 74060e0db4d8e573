"""Evaluation steps that run the layers several times: the ranks take turns, and each runs the step once."""
