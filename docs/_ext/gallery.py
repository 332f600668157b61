"""The directive `gallery`: every picture of the site, with a link to its page."""

import re
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

CARD = """:::{{grid-item-card}} {title}
:img-top: /{picture}
:link: /{page}
:link-type: doc
:::
"""


class Gallery(SphinxDirective):
    def run(self):
        source, cards, seen = Path(self.env.srcdir), [], set()
        for page in sorted(self.env.found_docs - {self.env.docname}):
            path = Path(self.env.doc2path(page))
            if path.suffix != ".md":
                continue
            self.env.note_dependency(str(path))
            text = path.read_text(encoding="utf-8")
            for title, name in re.findall(r"!\[([^\]]*)\]\((\S+?)\)", text):
                picture = (path.parent / name).resolve()
                if picture not in seen:
                    relative = picture.relative_to(source).as_posix()
                    cards.append(
                        CARD.format(title=title, picture=relative, page=page)
                    )
                    seen.add(picture)
        grid = "::::{grid} 1 2 2 3\n:gutter: 3\n\n" + "\n".join(cards) + "::::"
        return self.parse_text_to_nodes(grid)


def setup(app):
    app.add_directive("gallery", Gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
