"""Parameters of one stage divided over several processes: over the replicas, and over tensor-parallel ranks."""
