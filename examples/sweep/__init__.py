"""Train many adapters over one base, and choose: ``python -m examples.sweep``."""
