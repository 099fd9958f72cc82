"""What the command `modeling-gqa convert` and `inspect` do, without printing."""
