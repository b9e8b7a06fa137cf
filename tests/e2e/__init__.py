"""Real processes: started, killed, starved; each test says what the user then sees."""
