"""Deploy trained networks: find the fastest form, export, quantise, load."""
