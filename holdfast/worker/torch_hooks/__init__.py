"""What a worker adds to torch: step counts, phases, waits and device times."""
