"""Train the demo model and its draft from a seed."""
