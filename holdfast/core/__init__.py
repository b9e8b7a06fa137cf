"""Every decision Holdfast takes, as pure state machines.

An event and the time go in, actions come out. Nothing in here does I/O, reads a clock, starts a
thread or draws a random number, so the same events always lead to the same decisions: live, replayed
from the journal, or simulated.
"""
