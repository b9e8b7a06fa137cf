"""The page of `holdfast web` and its API: see `docs/web.md`."""
