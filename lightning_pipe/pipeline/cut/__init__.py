"""The cut: running one stage of an unmodified module by interception."""
