"""EPUB and PDF files that tests make themselves."""

import zipfile

import pytest

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
