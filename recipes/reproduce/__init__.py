"""The tables and figures of the papers, each by one command: ``python -m recipes.reproduce NAME``."""
