"""Defines the vocabulary that the wire carries, the journal keeps and the core decides on."""
