"""Outside clients, run unmodified against a server of the demo model: `make clients`."""
