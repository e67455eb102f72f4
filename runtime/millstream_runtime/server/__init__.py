"""HTTP: the OpenAI API, probes, metrics, warm-up and drain around one engine."""
