"""Decides which stalls are a hang."""
