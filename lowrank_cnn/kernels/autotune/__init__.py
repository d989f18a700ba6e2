"""Time, compare and choose plans on a device, and store the results."""
