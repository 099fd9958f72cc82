"""The scripts that train, run from a checkout: `python -m training.pretrain RECIPE`."""
