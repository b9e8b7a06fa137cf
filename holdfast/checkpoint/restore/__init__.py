"""From verified bytes to a live state."""
