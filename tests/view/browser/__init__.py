"""The page of `holdfast web` in a real browser: Debian's chromium, driven by playwright."""
