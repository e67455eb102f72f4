"""config.json to ModelConfig."""
