"""What stands between the convolutions of a network: norms and max-pools, forward and backward."""
