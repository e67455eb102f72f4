"""One verb a file; each has `run(argv) -> exit code`."""
