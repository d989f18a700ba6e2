"""Networks as graphs of calls: capture, patterns, fusing and merging."""
