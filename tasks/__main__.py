"""List the tasks, a line each."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent


def main() -> None:
    """Print every task's name and the first line of its docstring, then those of the studies."""
    for path in sorted([*ROOT.glob("[a-z]*.py"), *(ROOT / "studies").glob("[a-z]*.py")], key=_order):
        summary = (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]
        print(f"python -m {_module(path):<36} {summary}")


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)


def _order(path: Path) -> tuple[bool, str]:
    return path.parent != ROOT, path.stem


if __name__ == "__main__":
    main()
