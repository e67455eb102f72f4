"""What Jobs need in memory: the commands keep to it, and the operator asks for it. Imports no torch."""
