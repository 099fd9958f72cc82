"""These tests need vLLM, which `make serve-test` installs; in other environments they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
