"""Decides which ranks slow the others down."""
