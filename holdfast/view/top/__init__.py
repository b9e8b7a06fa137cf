"""Shows where a job is now, in a terminal: `holdfast top`."""
