"""The API: typed spec and status of `LLMDeployment`, the CRD made from them, and the manifest loader. No logic."""

GROUP = "millstream.dev"
VERSION = "v1alpha1"
KIND = "LLMDeployment"
PLURAL = "llmdeployments"
API_VERSION = f"{GROUP}/{VERSION}"
