"""Planning: what an LLMDeployment resolves to, and why. Pure: no I/O, no clock, no randomness."""
