"""From a model's name to its weights, tokenizer and chat template."""
