"""Decides when and where an injected fault strikes."""
