"""The API server: a client, an index of watched objects, comparison, fenced writes."""
