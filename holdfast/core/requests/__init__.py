"""Answers what scripts ask for: a store, barriers and votes."""
