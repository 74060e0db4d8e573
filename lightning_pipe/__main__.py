"""``python -m lightning_pipe``."""

from lightning_pipe.cli import main

main()
