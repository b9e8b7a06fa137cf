"""Hooks into torch: step counts, phases, waits and device times."""
