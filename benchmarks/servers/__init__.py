"""Millstream beside other inference servers: the same model, requests and client; `python -m benchmarks.servers`."""
