"""Parts for the tests of the runner."""
