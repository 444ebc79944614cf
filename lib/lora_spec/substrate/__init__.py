"""What the pocket tier measures on: the model pair, the corpora, the prompts and the trained adapters."""
