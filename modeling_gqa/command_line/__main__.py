"""`python -m modeling_gqa.command_line` is the command `modeling-gqa`."""

from .main import main

main()
