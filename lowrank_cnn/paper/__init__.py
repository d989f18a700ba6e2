"""The paper: its published figures as data, the rivals it counts, and the audit of both."""
