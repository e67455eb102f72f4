"""Model sources: download, verify and inspect models from hubs, registries and folders."""
