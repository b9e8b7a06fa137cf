"""Copies states into shared memory and manages images there."""
