"""From a trained network to one that runs: measure what is fastest, export, quantise, load back."""
