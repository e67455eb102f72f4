"""Sizing: bytes, seconds and dollars of one placement. Pure arithmetic."""
