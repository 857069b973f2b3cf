"""Measure a training of the user's: how it scales, which strategy, what it costs."""
