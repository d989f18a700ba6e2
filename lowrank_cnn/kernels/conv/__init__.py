"""The kernels of composite convolutions, forward and backward, their plans and their launches."""
