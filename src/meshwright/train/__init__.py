"""Runs a model's steps over a mesh."""
