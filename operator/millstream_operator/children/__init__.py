"""The objects of one LLMDeployment: apply, leave alone, delete."""
