"""The command `modeling-gqa`."""
