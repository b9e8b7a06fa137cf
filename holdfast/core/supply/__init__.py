"""Plans what a platform is asked for: the nodes that a job wants against those that it has."""
