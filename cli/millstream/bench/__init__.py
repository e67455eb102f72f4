"""`millstream bench`: run a workload against an endpoint or an engine, and measure it."""
