"""What makes the pods of the replicas: the contract, and its implementation for Deployments."""
