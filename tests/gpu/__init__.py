"""What only a machine with CUDA devices can show: `python -m tests.gpu` (`make gpu`) runs it part by part."""
