"""Traffic shifts to a revision in stages: how many pods each has, when there is one, and whether its pods are worse."""
