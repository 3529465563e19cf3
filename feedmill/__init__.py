"""Feedmill: posts in, labels out, and the device never waits. This package is the front door."""

__version__ = "0.1.0"
