"""Rendering: a Plan to Kubernetes objects, one builder a kind. Pure."""
