"""The engine: requests in, tokens out; one synchronous step at a time."""
