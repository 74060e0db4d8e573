"""Batches into micro-batches, and what these make into what one batch would have made."""
