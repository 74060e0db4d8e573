"""Keeps pytest from importing the packages whose modules train: they are there in `.venv-field` alone."""

collect_ignore_glob = ["cases/*"]
