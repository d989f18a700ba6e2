"""What every other room needs: errors, files, cache, locks, clocks, memory, environment and text."""
