"""What is looked at once, in the first batch of a run."""
