"""Copies of images in the memory of other nodes."""
