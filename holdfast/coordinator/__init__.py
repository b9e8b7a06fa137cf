"""The shell around the core: it carries events in and actions out, and keeps the journal."""
