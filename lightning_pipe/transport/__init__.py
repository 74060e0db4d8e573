"""Messages between ranks: what carries them, and how a failure of one rank reaches the others."""
