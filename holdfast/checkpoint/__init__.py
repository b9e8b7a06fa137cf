"""Snapshots in memory, checkpoints on storage: see `docs/checkpoints.md`."""
