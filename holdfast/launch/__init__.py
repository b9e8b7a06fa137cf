"""`holdfast run`: the process that starts the others and outlives them."""
