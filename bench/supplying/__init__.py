"""What `bench/platforms.py` measures, a module for each platform: `run(setting)` returns its lines."""
