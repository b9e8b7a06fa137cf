"""Counts how far each rank of the newest round has come."""
