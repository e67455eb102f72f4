"""Developer tools: local cluster, image builds, demo, training, reference pages. Never part of an image."""
