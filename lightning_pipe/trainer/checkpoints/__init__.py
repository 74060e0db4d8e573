"""Checkpoints of a divided module: gathered from the ranks that hold it, and divided over them again."""
