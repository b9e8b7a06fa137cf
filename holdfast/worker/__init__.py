"""Runs inside a training process, before and around the user's script."""
