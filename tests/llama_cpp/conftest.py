"""These tests need llama.cpp (`pip install xllamacpp`); in environments without it they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("xllamacpp") else ["test_*.py"]
