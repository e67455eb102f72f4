"""Text to token ids and back, and the chat template between messages and text."""
