"""What GPUs there are: read from nodes or from a command line, grouped so that a thousand nodes plan like one."""
