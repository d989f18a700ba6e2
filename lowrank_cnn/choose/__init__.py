"""Accuracy against measured time: low-rank designs beside thinner dense networks, over many runs."""
