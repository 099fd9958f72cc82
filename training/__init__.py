"""Pretraining and uptraining.

From a checkout: `python -m training.pretrain RECIPE`. Installed, this folder is `modeling_gqa.training`, and the same
command is `modeling-gqa pretrain RECIPE` or `python -m modeling_gqa.scripts.pretrain RECIPE`.
"""

import os

# OpenMP reads this when torch is imported. Threads that wait actively slow each other down several times over as soon
# as another program wants a core, and gain little on an idle machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
