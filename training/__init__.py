"""Pretraining, run from a checkout: `python -m training.pretrain configuration/recipes/NAME.yaml`."""
