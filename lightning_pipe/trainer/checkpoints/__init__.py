"""Checkpoints of a divided module: gathered from the ranks, written whole, and divided over the ranks again."""
