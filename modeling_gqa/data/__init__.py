"""Text: found, read, packed, sent through a model, and measured on."""
