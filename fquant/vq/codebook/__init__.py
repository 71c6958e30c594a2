"""Codebooks: their state, nearest codes, training by averages or gradients, and losses."""
