"""What is captured of a script's state, and how it is laid out as bytes."""
