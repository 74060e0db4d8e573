"""How a module would be cut, without starting processes."""
