"""The engine as the HTTP process sees it: a subprocess with a client and a restart policy."""
