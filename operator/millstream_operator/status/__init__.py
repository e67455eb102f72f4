"""Status: from one observation to the status that is written. Pure."""
