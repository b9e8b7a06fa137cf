"""`holdfast run` is one process that starts the others: its site, its orders for them, itself."""
