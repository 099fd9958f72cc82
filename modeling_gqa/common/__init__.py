"""What conversions, training and the command line share, and saved models do not need."""
