"""What a model folder says about text: tokenizer, special and added tokens, template, and where an answer ends."""
