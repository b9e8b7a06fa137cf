"""Captures a script's state and lays it out as bytes."""
