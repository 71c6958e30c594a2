"""Predict memory, traffic and time of a training step: ``python -m examples.plan``."""
