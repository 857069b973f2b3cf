"""Data for training: arrays and streams, and a small real set to try things with."""
