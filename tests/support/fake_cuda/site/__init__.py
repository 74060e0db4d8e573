"""A folder on the path of processes that have the fake device: Python imports what is in it when it starts."""
