"""Reconciling: from what is wanted and what is, to the writes that close the gap, and a status that tells."""
