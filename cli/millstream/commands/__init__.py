"""The subcommands, one module per command; each has `run(argv) -> exit code`."""
