"""What `bench/data.py` measures, one module a measure."""
