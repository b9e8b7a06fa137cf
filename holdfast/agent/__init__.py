"""One process per node that acts: starts and stops workers, watches them, tells what it saw."""
