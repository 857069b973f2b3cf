"""This process among the others."""
