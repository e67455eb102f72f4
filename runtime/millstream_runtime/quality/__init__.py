"""Compare a changed model with the one it came from, on texts of the user's own."""
