"""Batches on their way from the user's loader to the engine."""
