"""The text of HTML, EPUB and PDF files, which the tests make themselves, and what is said about files without one."""

import builtins
from zipfile import ZipFile

import pytest
from book_files import epub, pdf

from cacheformers.common import texts
from cacheformers.common.texts import load_text

PAGE = """<html><head><title>Not read</title><style>p {color: red}</style></head><body><!-- a remark -->
<h1>The   Title</h1><p>First &amp; <b>bold</b>
 line.<br>Second line.</p><script>alert("never")</script><ul><li>one</li><li>two</li></ul><pre>a
b</pre></body></html>"""
TEXT = "The Title\n\nFirst & bold line.\nSecond line.\n\none\n\ntwo\n\na\nb"


@pytest.fixture(autouse=True)
def extra():
    pytest.importorskip("bs4")
    pytest.importorskip("pypdf")


def test_html(tmp_path):
    path = tmp_path / "page.HTML"
    path.write_text(PAGE)
    assert load_text(str(path)) == (str(path), TEXT)
    path.write_bytes('<html><meta charset="latin-1"><body>né</body></html>'.encode("latin-1"))
    assert load_text(str(path))[1] == "né"
    path.write_bytes("<html><body>né</body></html>".encode("utf-16"))
    assert load_text(str(path), encoding="utf-16")[1] == "né"


def test_epub_in_the_order_of_its_spine(tmp_path):
    assert load_text(epub(tmp_path / "book.epub"))[1] == "Chapter one, é.\n\nThen the second."
    fonts = '<encryption><enc:CipherReference URI="OEBPS/font.otf"/></encryption>'
    assert "second" in load_text(epub(tmp_path / "fonts.epub", **{"META-INF/encryption.xml": fonts}))[1]


def test_pdf_page_by_page(tmp_path):
    assert load_text(pdf(tmp_path / "book.pdf", "Page one.", "", "Page three."))[1] == "Page one.\n\nPage three."
    assert load_text(pdf(tmp_path / "open.pdf", "For all.", password=""))[1] == "For all."


def test_what_cannot_be_read_says_why(tmp_path, monkeypatch):
    locked = '<encryption><enc:CipherReference URI="OEBPS/one.xhtml"/></encryption>'
    whole = (tmp_path / "whole.pdf", tmp_path / "whole.epub")
    pdf(whole[0], "Text.")
    epub(whole[1])
    (tmp_path / "cut.pdf").write_bytes(whole[0].read_bytes()[:60])
    (tmp_path / "cut.epub").write_bytes(whole[1].read_bytes()[:200])
    content = bytearray(whole[1].read_bytes())
    with ZipFile(whole[1]) as book:
        at = book.getinfo("OEBPS/one.xhtml")
    content[at.header_offset + 30 + len(at.filename)] ^= 0xFF  # the first byte of what is compressed
    (tmp_path / "flipped.epub").write_bytes(content)
    (tmp_path / "none.pdf").write_bytes(b"")
    (tmp_path / "blank.html").write_text("<html><body><script>x</script></body></html>")
    for path, message in {
        pdf(tmp_path / "secret.pdf", "Secret.", password="key"): "is encrypted: save a copy without its password",
        pdf(tmp_path / "scan.pdf", "", ""): "no text on its 2 pages: it may be a scan",
        str(tmp_path / "cut.pdf"): "is damaged, or no PDF",
        str(tmp_path / "none.pdf"): "is damaged, or no PDF",
        str(tmp_path / "cut.epub"): "is damaged, or no EPUB",
        str(tmp_path / "flipped.epub"): "is damaged, or no EPUB",
        epub(tmp_path / "locked.epub", **{"META-INF/encryption.xml": locked}): "is encrypted",
        epub(tmp_path / "missing.epub", **{"OEBPS/one.xhtml": None}): "is damaged, or no EPUB",
        epub(tmp_path / "odd.epub", **{"META-INF/container.xml": "<container/>"}): "where its chapters are",
        str(tmp_path / "blank.html"): "holds no text",
    }.items():
        with pytest.raises(ValueError, match=message) as raised:
            load_text(path)
        assert path in str(raised.value)
    monkeypatch.setattr(texts, "MOST_BYTES", 10)
    with pytest.raises(ValueError, match="read it in parts"):
        load_text(str(whole[1]))


def test_without_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *arguments, **more):
        if name.partition(".")[0] in ("bs4", "pypdf"):
            raise ModuleNotFoundError(name)
        return real(name, *arguments, **more)

    paths = [pdf(tmp_path / "book.pdf", "Text."), epub(tmp_path / "book.epub")]
    monkeypatch.setattr(builtins, "__import__", missing)
    for path in paths:
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'cacheformers\[documents\]'"):
            load_text(path)
