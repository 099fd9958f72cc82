"""The GQA paper's studies (2305.13245) on a model of one's own: `python -m studies`."""
