"""Real engines on this machine: clusters of Slurm and Ray that tests start, break and end."""
