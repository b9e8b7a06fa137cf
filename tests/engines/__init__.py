"""Real engines on this machine: Slurm, Ray and Kubernetes clusters that tests start, break and end."""
