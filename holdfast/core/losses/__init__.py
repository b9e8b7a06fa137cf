"""The loss that the script tells."""
