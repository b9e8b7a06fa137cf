"""What differs between the places a job can run in: who starts an agent, and what it is told."""
