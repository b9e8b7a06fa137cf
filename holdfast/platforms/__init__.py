"""Platforms differ in who starts an agent and in what the environment tells it."""
