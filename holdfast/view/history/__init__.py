"""What a viewer remembers of a job's past: see `holdfast.view.history.history`."""
