"""Diagnosis: from pods and refusals to one stable reason and one sentence. Pure."""
