"""What is timed, compared and chosen on a device, and where that is kept."""
