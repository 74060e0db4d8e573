"""Runs one stage of an unmodified module, by interception of the user's step."""
