"""Links between pages: those of the source pages are mended, and the build fails on a dead one."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from sphinx.errors import SphinxError


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found.get("id"), found.get("name")}
        self.links += [
            found[name] for name in ("href", "src") if found.get(name)
        ]


def dead_links(folder):
    """Return "page: link" for each dead link between the files of a folder."""
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (
                (path.parent / unquote(parts.path)).resolve()
                if parts.path
                else path
            )
            anchors = (
                pages[target].anchors
                if parts.fragment and target in pages
                else None
            )
            if not target.exists() or (
                anchors is not None and unquote(parts.fragment) not in anchors
            ):
                dead.append(f"{path.relative_to(folder)}: {link}")
    return dead


BACK = re.compile(
    r'(class="viewcode-back" href="[^"#]*/([\w.]+)\.html#)([\w.]+)"'
)


def mend_back_links(app, pagename, template, context, doctree):
    """Let source pages lead to the names under which the reference lists objects.

    sphinx.ext.viewcode assumes one module for all objects of a file.
    """
    if not pagename.startswith("_modules/"):
        return
    anchors = {}
    for entry in app.env.domains.python_domain.objects.values():
        anchors.setdefault(entry.docname, set()).add(entry.node_id)

    def mended(link):
        before, page, name = link.groups()
        here = sorted(anchors.get(f"reference/{page}", ()))
        words = name.split(".")
        tails = (".".join(words[k:]) for k in range(len(words)))
        found = (
            anchor
            for tail in tails
            for anchor in here
            if f".{anchor}".endswith(f".{tail}")
        )
        return f'{before}{next(found, name)}"'

    context["body"] = BACK.sub(mended, context["body"])


def check(app, error):
    dead = (
        dead_links(Path(app.outdir).resolve())
        if error is None and app.builder.name == "html"
        else []
    )
    if dead:
        raise SphinxError(
            f"{len(dead)} dead links (make clean, if these pages are old): "
            + "; ".join(dead)
        )


def setup(app):
    app.connect("html-page-context", mend_back_links)
    app.connect("build-finished", check)
    return {"parallel_read_safe": True}
