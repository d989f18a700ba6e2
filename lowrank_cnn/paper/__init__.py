"""The paper: its published figures as data, the audit of them, and the experiments that reproduce them."""
