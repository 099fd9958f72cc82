"""Errors that a user can act on; they stand in `modeling_gqa_cli`, which needs no torch."""

from modeling_gqa_cli.errors import INSTALL, UserError, did_you_mean, install_extra, listed, one_line

__all__ = ["INSTALL", "UserError", "did_you_mean", "install_extra", "listed", "one_line"]
