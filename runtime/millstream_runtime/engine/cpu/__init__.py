"""The device policy of a CPU: side thread, numbers of threads, freed memory, pages of the KV pool."""
