"""Compare formats and adapters by perplexity and multiple-choice accuracy: ``python -m examples.evaluate``."""
