"""List the tasks, a line each."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent


def main() -> None:
    """Print every task's name and the first line of its docstring, then those of the studies."""
    for path in [*sorted(ROOT.glob("[a-z]*.py")), *sorted((ROOT / "studies").glob("[a-z]*.py"))]:
        module = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        print(f"python -m {module:<36} {summary}")


if __name__ == "__main__":
    main()
