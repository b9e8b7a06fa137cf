"""Shared memory between a worker and its agent: the rank page, vital signs and injected faults."""
