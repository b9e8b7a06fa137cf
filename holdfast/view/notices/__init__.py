"""Sends notices of a job's incidents and of its end to webhooks and commands."""
