"""The operator: one LLMDeployment in, Kubernetes objects and conditions out. Never imports torch."""

__version__ = "0.2.0"
