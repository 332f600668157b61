"""The site: every public name has an entry in the reference; code fits the width of a page."""

import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("sphinx")
DOCS = Path(__file__).parents[1] / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import code_links  # noqa: E402
import dead_links  # noqa: E402


def test_dead_links_are_found(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "one.html").write_text(
        '<a id="top" href="folder/two.html#here">1</a><a href="#top">2</a><a href="https://a.b/c">3</a>'
        '<a href="folder/two.html#gone">4</a><img src="none.png"><a href="#gone">5</a>'
    )
    (tmp_path / "folder" / "two.html").write_text('<p id="here"><a href="../one.html">6</a></p>')
    expected = ["one.html: folder/two.html#gone", "one.html: none.png", "one.html: #gone"]
    assert dead_links.dead_links(tmp_path) == expected


def test_the_reference_has_a_page_for_each_public_module():
    listed = re.findall(r"^   (hbnode[\w.]*)$", (DOCS / "reference/index.md").read_text(), re.M)
    assert sorted(listed) == sorted(code_links.public_modules())


def test_every_public_name_has_one_entry():
    pages = code_links.reference_pages()
    entries = [path for page in pages.values() for _, path in page["entries"]]
    assert len(entries) == len(set(entries))
    assert set(code_links.HOMES.values()) == {*entries, *(path for page in pages.values() for path in page["modules"])}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("hbnode.nn.ODERNN", "hbnode.ODERNN"),
        ("ODERNN", "hbnode.ODERNN"),
        ("Oscillators", "hbnode.nn.Oscillators"),
        ("hbnode.data.Series.inputs", "hbnode.data.Series.inputs"),
        ("hbnode.ODEBlock.nfe", "hbnode.ODEBlock.nfe"),
        ("hbnode.HeavyBall", None),
        ("HBNODE.no_such_method", None),
    ],
)
def test_names_in_the_text_are_found_or_refused(name, path):
    assert code_links.find(name) == (path, True)


PAGES = sorted(DOCS.glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_code_fits_a_page(page):
    blocks = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    lines = [line for kind, block in blocks if kind != "sh" for line in block.splitlines()]  # sh: lists of commands
    assert [line for line in lines if len(line) > 80] == []
