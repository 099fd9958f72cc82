"""The Trainers of both scripts, with their losses and their callbacks."""
