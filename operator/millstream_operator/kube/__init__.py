"""Kubernetes: the API client, the index of watched objects, comparison and fenced writes."""
