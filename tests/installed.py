"""An installed hbnode in an environment of its own: its files, and the README's code that needs no extra.

``make wheel`` runs it with ``python -I``, which cannot see the checkout.
"""

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import hbnode

CHECKOUT = Path(__file__).resolve().parents[1] / "hbnode"


def main() -> None:
    """Raise AssertionError if something is missing."""
    distribution = importlib.metadata.distribution("hbnode")
    files = {str(file) for file in distribution.files}
    readme = distribution.metadata.get_payload() or distribution.metadata["Description"]
    codes = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    runs = [
        code
        for code in codes
        if all(importlib.util.find_spec(name) for name in re.findall(r"^(?:import|from) (\w+)", code, re.M))
    ]

    assert Path(hbnode.__file__).parent != CHECKOUT, "this is the checkout"
    assert hbnode.__version__ == distribution.version
    assert "hbnode/py.typed" in files
    assert not [file for file in files if file.startswith(("tests", "tasks", "benchmarks", "docs"))]
    assert len(runs) >= 2
    for code in runs:
        exec(compile(code, "README", "exec"), {"__name__": "readme"})
    print(f"hbnode {hbnode.__version__}: {len(files)} files, {len(runs)} of the README's {len(codes)} snippets")


if __name__ == "__main__":
    main()
