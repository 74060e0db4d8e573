"""What concerns the whole model although each rank has a part of it."""
