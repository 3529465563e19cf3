"""Measure how well a model labels posts, and how fast."""
