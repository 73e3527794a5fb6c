"""The text of HTML, EPUB and PDF files, which the tests make themselves, and what is said about files without one."""

import builtins
import zipfile

import pytest

from cacheformers.common import texts
from cacheformers.common.texts import load_text

PAGE = """<html><head><title>Not read</title><style>p {color: red}</style></head><body><!-- a remark -->
<h1>The   Title</h1><p>First &amp; <b>bold</b>
 line.<br>Second line.</p><script>alert("never")</script><ul><li>one</li><li>two</li></ul><pre>a
b</pre></body></html>"""
TEXT = "The Title\n\nFirst & bold line.\nSecond line.\n\none\n\ntwo\n\na\nb"

CONTAINER = '<container><rootfiles><rootfile full-path="OEBPS/content.opf"/></rootfiles></container>'
PACKAGE = """<package><manifest><item id="b" href="two%20b.xhtml"/><item id="a" href="one.xhtml"/>
<item id="css" href="style.css"/></manifest><spine><itemref idref="a"/><itemref idref="b"/></spine></package>"""


def epub(path, **more):
    files = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/content.opf": PACKAGE,
        "OEBPS/two b.xhtml": "<html><body><p>Then the second.</p></body></html>",
        "OEBPS/one.xhtml": "<html><head><title>x</title></head><body><p>Chapter one, é.</p></body></html>",
        "OEBPS/style.css": "p {}",
        **more,
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
        for name, content in files.items():
            if content is not None:
                book.writestr(name, content)
    return str(path)


def pdf(path, *pages, password=""):
    """A page for each string; an empty one has no text."""
    pypdf = pytest.importorskip("pypdf")
    from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

    writer = pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    for text in pages:
        page = writer.add_blank_page(300, 300)
        if text:
            stream = DecodedStreamObject()
            stream.set_data(f"BT /F1 12 Tf 20 200 Td ({text}) Tj ET".encode("latin-1"))
            fonts = DictionaryObject({NameObject("/F1"): font})
            page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
            page[NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return str(path)


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
    (tmp_path / "none.pdf").write_bytes(b"")
    (tmp_path / "blank.html").write_text("<html><body><script>x</script></body></html>")
    for path, message in {
        pdf(tmp_path / "secret.pdf", "Secret.", password="key"): "is encrypted: save a copy without its password",
        pdf(tmp_path / "scan.pdf", "", ""): "no text on its 2 pages: it may be a scan",
        str(tmp_path / "cut.pdf"): "is damaged, or no PDF",
        str(tmp_path / "none.pdf"): "is damaged, or no PDF",
        str(tmp_path / "cut.epub"): "is damaged, or no EPUB",
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
