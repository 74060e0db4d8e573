"""Trains published modules on one device and on a pipeline, and says where they differ: ``make test-field``."""
