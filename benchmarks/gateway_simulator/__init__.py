"""A trace simulator of the gateway's decision: the real `pick` over replicas that are simulated step by step."""
