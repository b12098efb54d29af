"""How prompts become token ids: the demo's tokenizer and chat template, and small tokenizers that are trained here."""
