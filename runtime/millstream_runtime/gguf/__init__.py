"""GGUF files, what llama.cpp reads: metadata and table of tensors, config and tokenizer. No torch."""
