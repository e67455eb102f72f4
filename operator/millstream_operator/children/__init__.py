"""Children: apply and delete the objects of one LLMDeployment, and its companions."""
