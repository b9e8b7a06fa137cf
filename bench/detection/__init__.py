"""What `detect.py` measures, one module each: a setting goes in, lines with figures come out."""
