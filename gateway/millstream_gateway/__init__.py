"""The gateway's decision: which replica answers a request first. Pure; never imports torch, FastAPI or the operator."""

__version__ = "0.2.0"
