"""State that lives through the re-entry of a function: see "Living state" in `docs/inprocess.md`."""
