"""oneDNN's product of bfloat16 numbers: its check on this machine, and one row of it by a kernel of ours."""
