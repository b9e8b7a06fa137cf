"""Decides which nodes are fit for a place, from tests in pairs."""
