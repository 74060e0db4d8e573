"""Training with schedules that keep batches in flight between calls."""
