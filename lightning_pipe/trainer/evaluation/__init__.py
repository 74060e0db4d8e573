"""Validation, test and prediction: batch by batch, or in a stream through the stages."""
