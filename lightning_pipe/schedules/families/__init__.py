"""One file for each family of synchronous schedules."""
