"""What the machines of the nodes are used for."""
