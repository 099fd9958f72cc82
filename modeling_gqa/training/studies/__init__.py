"""The three studies of the GQA paper on a model of one's own."""
