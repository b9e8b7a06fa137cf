"""Decides when all ranks change the settings of their data loaders."""
