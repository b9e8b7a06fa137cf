"""Loads verified bytes into a living state."""
