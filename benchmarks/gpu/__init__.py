"""What the engine does on one GPU, measured: see `python -m benchmarks.gpu --help`."""
