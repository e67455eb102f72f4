"""What the operator asks of running pods, directly and through the Service."""
