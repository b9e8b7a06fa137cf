"""Functions that are left and entered again when a rank fails: see `docs/inprocess.md`."""
