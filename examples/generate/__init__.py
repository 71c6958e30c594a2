"""Answer prompts with a decoder, packed or not, and adapters: ``python -m examples.generate``."""
