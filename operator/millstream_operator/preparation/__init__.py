"""A model that is quantized in the cluster, or judged, before a pod of it starts."""
