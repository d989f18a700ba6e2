"""Decode one image and frame it as the window that a network sees."""
