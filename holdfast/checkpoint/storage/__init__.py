"""Writes, commits, verifies and deletes checkpoints on storage."""
