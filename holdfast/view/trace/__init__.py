"""Draws a job as a file that Perfetto and chrome://tracing open."""
