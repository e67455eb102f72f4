"""HTTP: the protocol, its caps, API keys, and errors."""
