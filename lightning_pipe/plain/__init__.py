"""`lightning_pipe.Pipeline`, for training loops of the user's own."""
