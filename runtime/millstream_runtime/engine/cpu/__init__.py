"""The device policy of a CPU: numbers of threads, freed memory, pages of the KV pool."""
