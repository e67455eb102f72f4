"""The engine in its own process: the messages, their framing, and the loop that runs the engine."""
