"""Filters that learn their shapes while they train, within a budget of MACs, or of time as deployed."""
