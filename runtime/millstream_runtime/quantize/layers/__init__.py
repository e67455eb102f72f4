"""One layer of a model: its weights, its run over calibration sequences, statistics of its inputs."""
