"""What every other room needs: errors, files, cache, locks, clocks, memory, environment and text."""

__version__ = "0.1.0"
"""The one place that holds the version."""
