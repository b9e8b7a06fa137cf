"""`holdfast run` as processes: the launcher, the site it runs at, and its children's orders."""
