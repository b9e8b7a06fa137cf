"""Replicates images in the memory of other nodes."""
