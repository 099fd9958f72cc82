"""Pretraining, run from a checkout: `python -m training.pretrain configuration/recipes/NAME.yaml`."""

import os

# Read by OpenMP when torch is imported. Threads that wait actively slow each other down several times over as soon as
# another program wants a core, and gain little on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
