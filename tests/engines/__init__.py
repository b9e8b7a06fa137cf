"""Real engines on this machine: clusters of Slurm, Ray and Kubernetes that tests start, break and end."""
