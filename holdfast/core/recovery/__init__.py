"""Decides what to do about a fault."""
