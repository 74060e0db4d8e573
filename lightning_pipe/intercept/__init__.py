"""Runs the user's own step on every rank, and in it the layers of one stage alone.

`stage_run` draws a step on two stages, with the points (1) to (6) that comments refer to.
"""
