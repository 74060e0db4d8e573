"""Measures what a module costs on the present machine."""
