"""Who holds which parameter and buffer, and how their holders stay equal."""
