"""Losses of sequences and of two models: preferences (DPO, ORPO, KTO) and distillation."""
