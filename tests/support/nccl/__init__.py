"""NCCL's rules as a model: what the engine issues for GPUs is recorded over threads and played under these rules."""
