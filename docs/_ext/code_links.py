"""Inline code that names a public object becomes a link to its entry; a stale name fails the build."""

import builtins
import functools
import importlib
import inspect
import pkgutil
import re

from docutils import nodes
from sphinx.domains.python import ObjectEntry
from sphinx.ext.intersphinx import InventoryAdapter
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.nodes import make_refnode

import hbnode

log = logging.getLogger(__name__)

WITHOUT_ALL = {  # what is public in modules without __all__
    "hbnode.nfe": ["NFE"],
    "hbnode.nn.attention": ["KeyValueCache"],
    "hbnode.nn.transformer": [
        "TransformerState",
        "DepthState",
        "Connection",
        "MomentumConnection",
        "AdaptiveConnection",
        "MomentumStateConnection",
        "HeavyBallConnection",
        "NesterovConnection",
    ],
}
NAME = re.compile(r"~?([A-Za-z_]\w*(?:\.\w+)*)\s*(\(.*\))?", re.S)
CAMEL_CASE = re.compile(r"[A-Z]\w*[a-z]\w*[A-Z]\w*|[A-Z]{2,}[a-z]\w+")
SHORT = {"nn": "torch.nn", "np": "numpy", "pd": "pandas"}


def public_names(module):
    return list(
        getattr(
            importlib.import_module(module),
            "__all__",
            WITHOUT_ALL.get(module, []),
        )
    )


@functools.cache
def public_modules():
    """Modules with public names, the shortest path first."""
    found = [
        "hbnode",
        *(
            info.name
            for info in pkgutil.walk_packages(hbnode.__path__, "hbnode.")
        ),
    ]
    public = [name for name in found if "._" not in name and public_names(name)]
    return sorted(
        public, key=lambda name: (name.count("."), public.index(name))
    )


def public_objects():
    """Every public path, "hbnode.nn.ODERNN", and its object."""
    return {
        f"{module}.{name}": getattr(importlib.import_module(module), name)
        for module in public_modules()
        for name in public_names(module)
    }


def home_of():
    """The path under which each public object has its entry: the first, which is the shortest."""
    homes, paths = {}, {}
    for path, value in PUBLIC.items():
        if inspect.isclass(value) or inspect.isfunction(value):
            paths[path] = homes.setdefault(id(value), path)
        elif inspect.ismodule(value):
            paths[path] = value.__name__
        else:
            paths[path] = path
    return paths


PUBLIC = public_objects()
HOMES = home_of()


def kind(value):
    """What autodoc calls an object."""
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if inspect.isfunction(value) else "data"


def reference_pages():
    """For each public module: its names, its public modules, and the entries that stand on its page."""
    modules, pages = public_modules(), {}
    for module in modules:
        paths = {name: f"{module}.{name}" for name in public_names(module)}
        names = [name for name in paths if paths[name] not in modules]
        entries = [
            (kind(PUBLIC[paths[name]]), paths[name])
            for name in names
            if HOMES[paths[name]] == paths[name]
        ]
        pages[module] = {
            "names": names,
            "modules": sorted(set(paths.values()) & set(modules)),
            "entries": entries,
        }
    return pages


def add_aliases(app, env):
    """Let every public path lead to the entry of its object, which must exist."""
    objects = env.domains.python_domain.objects
    for path, home in HOMES.items():
        if home not in objects:
            log.warning(
                "the reference has no entry for %s", home, type="code_links"
            )
        elif path not in objects:
            entry = objects[home]
            objects[path] = ObjectEntry(
                entry.docname, entry.node_id, entry.objtype, True
            )


def exists(owner, attribute):
    """Whether a class, its instances or a module have this attribute."""
    if hasattr(owner, attribute):
        return True
    if not inspect.isclass(owner):
        return False
    for base in owner.__mro__[:-1]:
        if attribute in inspect.get_annotations(base) or attribute in getattr(
            base, "__slots__", ()
        ):
            return True
        if base.__module__.startswith(
            "hbnode"
        ) and f"self.{attribute}" in inspect.getsource(base):
            return True
    return False


def find(name, here=None):
    """The public path that a name means, its entry, and whether the name is one of ours."""
    first, *rest = name.removeprefix("hbnode.").split(".")
    candidates = [f"{here}.{first}"] if here else []
    candidates += [f"{module}.{first}" for module in public_modules()]
    path = next((path for path in candidates if path in HOMES), None)
    if name.startswith("hbnode.") and f"hbnode.{first}" in public_modules():
        path = f"hbnode.{first}"
    if path is None:
        return None, name.startswith("hbnode.")
    value = (
        importlib.import_module(path)
        if path in public_modules()
        else PUBLIC[path]
    )
    target = HOMES.get(path, path)
    for part in rest:
        if not exists(value, part):
            return None, True
        inside = f"{target}.{part}"
        if inspect.ismodule(value) and inside in HOMES:
            inside = HOMES[inside]
        value, target = getattr(value, part, None), inside
    return target, True


def elsewhere(env, name):
    """The address of an object of another package: by its path, or by the name of a class."""
    inventory = InventoryAdapter(env).main_inventory
    for objects in inventory.values():
        if name in objects:
            return objects[name].uri
    if CAMEL_CASE.fullmatch(name):
        for objects in inventory.values():
            for path, item in objects.items():
                if path.endswith(f".{name}"):
                    return item.uri
    return None


class CodeLinks(SphinxPostTransform):
    default_priority = 5  # before references are resolved

    def run(self, **kwargs):
        objects = self.env.domains.python_domain.objects
        for node in list(self.document.findall(nodes.literal)):
            if self.linked(node) or not (
                match := NAME.fullmatch(node.astext().strip())
            ):
                continue
            name, call = match.groups()
            name = re.sub(
                r"^(nn|np|pd)(?=\.)", lambda short: SHORT[short[0]], name
            )
            bare = name.islower() and "." not in name
            if bare and not (call or callable(PUBLIC.get(f"hbnode.{name}"))):
                continue  # an argument, or a word
            here = self.env.docname.replace("/", ".").removeprefix("reference.")
            path, ours = find(name, here if here in public_modules() else None)
            while path and path not in objects and path.count(".") > 1:
                path = path.rpartition(".")[
                    0
                ]  # an attribute without an entry: the class
            if path in objects:
                entry = objects[path]
                arguments = (
                    self.app.builder,
                    self.env.docname,
                    entry.docname,
                    entry.node_id,
                    [],
                )
                self.wrap(node, make_refnode(*arguments, title=path))
            elif url := elsewhere(self.env, name):
                self.wrap(
                    node, nodes.reference("", "", internal=False, refuri=url)
                )
            elif (ours and "._" not in name) or self.looks_like_ours(name):
                log.warning(
                    "no public object of hbnode: `%s`",
                    node.astext(),
                    location=node,
                    type="code_links",
                )

    def linked(self, node):
        inside = nodes.reference, nodes.title, nodes.target
        return (
            isinstance(node.parent, inside)
            or "xref" in node["classes"]
            or "no-link" in node["classes"]
        )

    def wrap(self, node, reference):
        reference["classes"].append("code-link")
        node.replace_self(reference)
        reference.children = []
        reference += node

    def looks_like_ours(self, name):
        if (
            "." in name
            or hasattr(builtins, name)
            or name in self.config.code_links_foreign
        ):
            return False
        return bool(CAMEL_CASE.fullmatch(name))


def resolve(app, env, node, contnode):
    """References that autodoc could not resolve from where they stand: by the same rules as inline code."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    path, _ = find(target, node.get("py:module"))
    if entry := env.domains.python_domain.objects.get(path):
        return make_refnode(
            app.builder,
            node["refdoc"],
            entry.docname,
            entry.node_id,
            contnode,
            path,
        )
    if url := elsewhere(env, target):
        return nodes.reference("", "", contnode, internal=False, refuri=url)
    return None


def setup(app):
    app.add_config_value("code_links_foreign", [], "env")
    app.connect("env-updated", add_aliases)
    app.connect("missing-reference", resolve)
    app.add_post_transform(CodeLinks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
