"""Decides which nodes form the next round, and where each of them sits."""
