"""Messages between processes of one host, through shared memory."""
