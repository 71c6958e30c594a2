"""Predict memory and time of a step before it runs: ``python -m examples.plan``."""
