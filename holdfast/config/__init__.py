"""One schema for flags, environment variables and `holdfast.toml`."""
