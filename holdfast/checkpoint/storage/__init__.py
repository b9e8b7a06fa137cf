"""Checkpoints on storage: files, manifests, commits and retention."""
