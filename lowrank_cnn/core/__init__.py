"""Shared by all rooms: errors, files, locks, the cache, clocks, comparing results, the environment and text."""

__version__ = "0.1.0"
"""The one place that holds the version."""
