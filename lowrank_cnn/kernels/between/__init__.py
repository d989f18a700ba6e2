"""Kernels for the layers between convolutions: norms and max-pools, forward and backward."""
