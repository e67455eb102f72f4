"""What every command that makes a model folder shares: a folder to work in, files next to the weights."""
