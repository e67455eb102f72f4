"""Diagnosis: one stable reason and one sentence, from pods and from refusals of the API server. Pure."""
