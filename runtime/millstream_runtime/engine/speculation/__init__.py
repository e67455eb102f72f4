"""Several tokens per step: drafts, and which of them stand."""
