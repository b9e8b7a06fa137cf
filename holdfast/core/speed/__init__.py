"""Measures how fast the ranks of the newest round train."""
