"""Finds the node that the faults come from."""
