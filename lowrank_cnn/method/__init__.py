"""The method of the paper: specs, schemes, layers, initialisation, counting, conversion and decomposition."""
