"""Rendering: a Plan to Kubernetes objects, one builder per kind. Pure."""
