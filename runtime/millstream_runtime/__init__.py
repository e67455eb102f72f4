"""Millstream's inference runtime: paged KV cache, continuous batching, an OpenAI-compatible server.

Importing this package, `config` or `errors` loads neither torch nor the HTTP stack: the operator and the
command line read the contract from here.
"""

__version__ = "0.2.0"
