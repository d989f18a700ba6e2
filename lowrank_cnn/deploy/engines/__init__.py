"""Engines that run exported networks: one file each, and the table of targets."""
