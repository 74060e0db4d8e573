"""Functions from schedule to schedule, and from schedule to messages."""
