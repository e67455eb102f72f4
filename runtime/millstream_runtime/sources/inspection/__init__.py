"""What a model is, read from the few bytes of a source that say it."""
