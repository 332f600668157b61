"""The oldest and the newest releases that pyproject.toml allows, each in an environment of its own.

``make compat`` installs each row, runs the tests that need no extra, and prints one table. It fails if the Python of a
row does not start. pyenv needs the versions by name: ``PYENV_VERSION=3.11.7:3.10.13:3.13.0 make compat``.
"""

import shutil
import subprocess
import sys
from pathlib import Path

OLDEST: list[str] = ["-c", "constraints-oldest.txt"]
ROWS = [("python3.10", OLDEST), ("python3.11", []), ("python3.13", [])]  # [] is the newest torch
FOLDER = Path(".venv-compat")
TESTS = """tests/test_fields.py tests/test_nfe.py tests/test_torchdiffeq.py tests/test_properties.py
tests/solve/test_adjoints.py tests/solve/test_loop.py tests/solve/test_events.py
tests/nn/test_rules.py tests/nn/test_scan.py tests/nn/test_recurrent.py tests/nn/test_attention.py""".split()
GRAPHS = ["-m", "not gpu", "tests/solve/test_compiled.py"]  # with the slow ones
NO_GRAPHS = ["-k", "not export and not compile and not in_a_graph"]  # torch's own compiler differs between releases
VERSIONS = """import importlib.metadata, platform
names = "torch numpy torchdiffeq torchsde".split()
print(" | ".join([platform.python_version(), *map(importlib.metadata.version, names)]))
"""


def run(*command: str, **kwargs) -> "subprocess.CompletedProcess[str]":
    """Run a command and echo it to the log."""
    print("$", " ".join(part.split("\n")[0] for part in command), flush=True)
    return subprocess.run(command, text=True, **kwargs)


def starts(python: str) -> bool:
    """Return whether a Python starts; pyenv has shims for versions that are not active."""
    return shutil.which(python) is not None and run(python, "-c", "", stderr=subprocess.DEVNULL).returncode == 0


def row(python: str, constraints: list[str]) -> tuple[str, bool]:
    """Install and test a row; return its line of the table and whether all is well."""
    if not starts(python):
        return f"| {python.removeprefix('python')} | does not start: not tested |", False
    bin = FOLDER / python / "bin"
    run(python, "-m", "venv", "--clear", str(FOLDER / python), check=True)
    pip = [str(bin / "python"), "-m", "pip", "--disable-pip-version-check"]
    wanted = ["-e", ".", "pytest", "pytest-timeout", "hypothesis"]
    run(*pip, "install", "--quiet", *constraints, *wanted, check=True)
    fits = run(*pip, "check").returncode == 0
    calls = [[*NO_GRAPHS, *TESTS]] if constraints else [TESTS, GRAPHS]
    tests = [run(str(bin / "python"), "-m", "pytest", "-q", *call, stdout=subprocess.PIPE) for call in calls]
    print(*(test.stdout for test in tests))
    versions = run(str(bin / "python"), "-c", VERSIONS, check=True, stdout=subprocess.PIPE).stdout.strip()
    found = "; ".join(test.stdout.strip().rpartition("\n")[2].strip("= ") for test in tests)
    return f"| {versions} | {'ok' if fits else 'broken'} | {found} |", fits and not any(t.returncode for t in tests)


def main() -> None:
    """Print the table; exit with 1 if a row fails."""
    lines, well = zip(*(row(*entry) for entry in ROWS), strict=True)
    print("\n| Python | torch | numpy | torchdiffeq | torchsde | pip check | tests |\n|---|---|---|---|---|---|---|")
    print("\n".join(lines))
    sys.exit(0 if all(well) else 1)


if __name__ == "__main__":
    main()
