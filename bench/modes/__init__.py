"""The questions `recovery.py` can ask, one module each: a setting goes in, a report comes out."""
