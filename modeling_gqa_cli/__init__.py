"""What can be asked of the command `modeling-gqa`: its commands, their options, and recipes.

Nothing here imports torch or `modeling_gqa`, which take seconds: help, the version, wrong usage and missing files are
answered before.
"""
