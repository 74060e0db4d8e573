"""Data modules. Each reads the published data set from the hub or from local files, and has a real local stand-in."""
