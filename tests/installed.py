"""An installed hbnode in an environment of its own: its files, its modules, and the README's code that needs no extra.

``make wheel`` runs it with ``python -I``, which cannot see the checkout.
"""

import importlib.metadata
import importlib.util
import pkgutil
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
    modules = [module.name for module in pkgutil.walk_packages(hbnode.__path__, "hbnode.", onerror=lambda name: None)]
    failed = {}
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            failed[name] = str(error)
    assert all("Fix: pip install" in text for text in failed.values()), failed
    assert codes[0] in runs
    for code in runs:
        exec(compile(code, "README", "exec"), {"__name__": "readme"})
    print(f"hbnode {hbnode.__version__}: {len(files)} files, {len(runs)} of the README's {len(codes)} snippets")
    print(f"{len(modules) - len(failed)} of {len(modules)} modules import; the others need an extra: {sorted(failed)}")


if __name__ == "__main__":
    main()
