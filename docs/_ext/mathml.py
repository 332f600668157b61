"""Formulas as MathML, which browsers show without a script or a network."""

import re

from docutils import nodes
from latex2mathml.converter import convert

PRIMED = re.compile(
    r"<msup>(<mi>\w+</mi>)<m[io]>(&#x0?203[2-4];)</m[io]></msup>"
)


def mathml(node, **options):
    """Return the formula with primes beside the letters: they are raised already."""
    text = convert(node.astext(), **options)
    return PRIMED.sub(r"<mrow>\1<mi>\2</mi></mrow>", text)


def inline(self, node):
    self.body.append(f'<span class="math">{mathml(node)}</span>')
    raise nodes.SkipNode


def display(self, node):
    self.body.append(f'<div class="math">{mathml(node, display="block")}</div>')
    raise nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
