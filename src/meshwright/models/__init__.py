"""Keras models as functions of arrays."""
