"""Starts other processes, and finds out whether this machine is ready for them."""
