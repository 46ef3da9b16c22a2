"""From a model's name to a torch module, a tokenizer and the hash of its bf16 state."""
