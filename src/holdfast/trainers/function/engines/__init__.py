"""Engines start the workers of a run and say how they end."""
