"""Shows reports of a job to people and to tools; never part of the job.

A viewer takes the structs of `messages/reports.py` and nothing else: it reads no state, no journal and
no socket, so the same viewer serves a running job, a past one and a simulated one.
"""
