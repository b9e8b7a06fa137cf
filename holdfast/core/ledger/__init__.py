"""Accounts for every second of every rank."""
