"""Frames, packets, TLS and read-only visitors: how processes of a job talk over sockets."""
