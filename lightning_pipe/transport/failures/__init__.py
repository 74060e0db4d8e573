"""One rank failing ends all of them, and the reason reaches the user."""
