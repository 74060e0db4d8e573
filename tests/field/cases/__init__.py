"""Functions that make the modules of the list, each with the batches it trains on."""
