"""The layers of CONTRIBUTING.md, from the imports: none points up, and there are no circles."""

import ast
import functools
import graphlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

# From the top down. A module imports from its own layer and those below it; a folder stands for its modules.
LAYERS = [
    ["tasks", "tasks.__main__", "tasks.results", "tasks.studies"],
    [
        "tasks.adding",
        "tasks.copying",
        "tasks.language_model",
        "tasks.pathological",
        "tasks.pixel_mnist",
        "tasks.speech",
    ],
    ["tasks.bouncing_balls", "tasks.polyphonic_music"],
    ["tasks.density", "tasks.latent_sde", "tasks.recall", "tasks.transformer_copy"],
    ["tasks.image_generation", "tasks.lra", "tasks.translation"],
    [
        "tasks.classification",
        "tasks.image_classification",
        "tasks.plane_vibration",
        "tasks.point_cloud",
        "tasks.silverbox",
        "tasks.walker2d",
    ],
    ["tasks.annealing", "tasks.experiments", "tasks.result_tables"],
    ["tasks.readers"],
    ["tasks.rows"],
    ["tasks.data", "tasks.models"],
    ["tasks.common"],
    ["hbnode"],
    ["hbnode.estimators"],
    ["hbnode.diagnostics", "hbnode.features"],
    ["hbnode.optim", "hbnode.training"],
    ["hbnode.distributions"],
    ["hbnode.nn"],
    ["hbnode.solve"],
    ["hbnode.solve.integral", "hbnode.solve.registry"],
    ["hbnode.solve.sde"],
    ["hbnode.solve.torchsde"],
    ["hbnode.solve.odeint"],
    ["hbnode.solve.adjoints", "hbnode.solve.compiled", "hbnode.solve.torchdiffeq_methods"],
    ["hbnode.solve.loop"],
    ["hbnode.solve.events", "hbnode.solve.graph"],
    ["hbnode.solve.adaptive"],
    ["hbnode.solve.stepper"],
    ["hbnode.solve.control", "hbnode.solve.grid", "hbnode.solve.settings"],
    ["hbnode.solve.methods", "hbnode.solve.term"],
    ["hbnode.solve.jacobian"],
    ["hbnode.solve.tableaus"],
    ["hbnode.data"],
    ["hbnode.fields", "hbnode.nfe", "hbnode.signal"],
    ["hbnode._tree"],
    ["hbnode._times"],
    ["hbnode._checks"],
    ["hbnode._torch"],
    ["hbnode._progress", "hbnode._untraced"],
    ["hbnode.errors"],
]


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for folder in ("hbnode", "tasks") for path in sorted((ROOT / folder).rglob("*.py"))}


@functools.cache
def imports(name):
    """The modules of the project that a module imports, wherever in it, for annotations too."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} & set(MODULES) or {node.module}
    return {other for other in found if other in MODULES and other != name}


@functools.cache
def layer(name):
    """The index of the layer that names a module, or the nearest folder that it is in."""
    while name:
        for index, members in enumerate(LAYERS):
            if name in members:
                return index
        name = name.rpartition(".")[0]
    raise AssertionError("a module has no layer")


def test_no_import_points_up():
    for name in MODULES:
        for other in imports(name):
            # names of the package itself, "import hbnode", are for those above it
            assert layer(other) >= layer(name), f"{name} imports {other}, which is in a higher layer"


def test_no_circles():
    order = graphlib.TopologicalSorter({name: imports(name) for name in MODULES}).static_order()
    assert set(order) == set(MODULES)


def test_private_functions_of_torch_have_one_file():
    private = re.compile(r"\btorch\._[A-Za-z]|_current_level|_sequence_nr")
    for name, path in MODULES.items():
        if name != "hbnode._torch" and private.search(path.read_text(encoding="utf-8")):  # in a docstring it may be
            assert not private.search("\n".join(ast.unparse(node) for node in _statements(path))), name


def _statements(path):
    """The statements of a module, without docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = None
    return tree.body
