"""Puts a job on one page, to be read, mailed or attached to a ticket."""
