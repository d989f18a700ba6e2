"""Kernels of depthwise composites: bands of channels, each with filters of one shape or passed on as it is."""
