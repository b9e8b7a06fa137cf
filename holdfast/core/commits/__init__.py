"""Decides when a snapshot counts, when a checkpoint is complete, and what is restored."""
