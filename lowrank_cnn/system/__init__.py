"""The ground under every room: errors, clock, memory, environment, cache and text."""
