"""The vocabulary: what crosses the wire, what the journal keeps, what the core decides on."""
