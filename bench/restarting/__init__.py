"""Measures of in-process restart; `bench/inprocess.py` runs them."""
