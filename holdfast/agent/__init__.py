"""The agent: one process per node that starts, watches and stops workers, and reports what it sees."""
