"""How fast strips can be: one low-rank layer as compiled code, and in the engines."""
