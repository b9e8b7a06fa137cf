"""Flags, environment variables and `holdfast.toml` share one schema."""
