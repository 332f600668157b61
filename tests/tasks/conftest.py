"""The tests of tasks need the packages of the extra "tasks"; without them they are not collected."""

import importlib.util

NEEDED = ("matplotlib", "pandas", "sacrebleu", "scipy", "sklearn", "soundfile", "tokenizers", "tqdm")
collect_ignore_glob = [] if all(map(importlib.util.find_spec, NEEDED)) else ["test_*.py"]
