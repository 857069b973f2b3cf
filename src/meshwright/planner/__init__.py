"""Decides how a model is split: search, cost arithmetic, calibration, explanation."""
