"""A real local Kubernetes cluster, from package registries alone."""
