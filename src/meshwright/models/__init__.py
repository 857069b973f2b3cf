"""Keras models, seen from the side of what they compute."""
