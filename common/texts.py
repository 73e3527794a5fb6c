"""The text of one document, from text, Markdown, HTML, EPUB, PDF, or a row of JSON lines or parquet.

HTML, EPUB and PDF need the extra `documents` (beautifulsoup4, pypdf).
"""

from __future__ import annotations

import posixpath
import re
import zlib
from collections.abc import Callable
from lzma import LZMAError
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from zipfile import BadZipFile, ZipFile

PLAIN = (".txt", ".md")
MOST_BYTES = 200 * 2**20  # of an EPUB's chapters, unpacked
INVISIBLE = ("script", "style", "template", "noscript", "head")
PARAGRAPHS = ("p", "div", "section", "article", "header", "footer", "aside", "main", "blockquote", "pre", "table", "hr")
HEADINGS = ("ul", "ol", "dl", "h1", "h2", "h3", "h4", "h5", "h6")  # lists have empty lines around them too
LINES = ("li", "tr", "dt", "dd", "figcaption", "caption")
NO_EXTRA = "Reading {path} needs {name}: pip install 'cacheformers[documents]'"


def load_text(
    path: str, document: int | None = None, text_field: str = "text", encoding: str | None = None
) -> tuple[str, str]:
    """Return the name and the text of a file's document.

    Args:
        document: which one of JSON lines or parquet; None for the longest.
        text_field: the field of JSON lines or parquet that holds the text.
        encoding: of .txt, .md and .html files; None for UTF-8, or what the HTML says.

    Raises:
        FileNotFoundError, ValueError: no such file, field or document, text in another encoding, or a file that is
            encrypted, damaged, or holds no text.
        ModuleNotFoundError: the extra `documents` is missing.
    """
    suffix = Path(path).suffix.lower()
    is_file = Path(path).is_file()
    if encoding is not None and suffix not in (*PLAIN, ".html", ".htm", ".xhtml"):
        raise ValueError(f"--encoding is for .txt, .md and .html files, and {path} is not one: leave it out.")
    if is_file and suffix in PLAIN:
        texts: list[str | None] = [decoded(path, encoding or "utf-8")]
    elif is_file and suffix in READERS:
        text = READERS[suffix](path, encoding)
        if not text.strip():
            raise ValueError(f"{path} holds no text.")
        texts = [text]
    else:
        from cacheformers.common.sources import load_texts  # imports datasets, which takes a second

        texts = list(load_texts([path], text_field))
    if document is None:
        document = max(range(len(texts)), key=lambda number: len(texts[number] or ""))
    if not 0 <= document < len(texts):
        raise ValueError(f"{path} has {len(texts)} documents; --document counts from 0.")
    return path if len(texts) == 1 else f"{path}, document {document}", texts[document] or ""


def decoded(path: str, encoding: str) -> str:
    """Read a text file; raise ValueError for another or an unknown encoding."""
    try:
        return Path(path).read_text(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not {encoding} text (byte {error.start}: {error.reason}). Name its encoding, for example "
            "--encoding latin-1."
        ) from error
    except LookupError as error:
        raise ValueError(f"Python knows no encoding {encoding!r}. Try utf-8, latin-1 or utf-16.") from error


def read_html(path: str, encoding: str | None) -> str:
    """Return the text of a web page that is saved in a file."""
    return visible_text(Path(path).read_bytes() if encoding is None else decoded(path, encoding), path)


def visible_text(markup: bytes | str, path: str) -> str:
    """Return what HTML shows: paragraphs with empty lines between them; nothing of scripts and styles."""
    page = parsed(markup, path)
    from bs4.element import NavigableString

    for tag in page(INVISIBLE):
        tag.decompose()
    for string in page.find_all(string=True):
        if type(string) is NavigableString and string.find_parent("pre") is None:
            string.replace_with(re.sub(r"\s+", " ", string))
    for tag in page("br"):
        tag.replace_with("\n")
    for names, gap in ((PARAGRAPHS + HEADINGS, "\n\n"), (LINES, "\n")):
        for tag in page(names):
            tag.insert_before(gap)
            tag.insert_after(gap)
    text = re.sub(r" *\n *", "\n", page.get_text())
    return re.sub(r"\n{3,}", "\n\n", text).strip()


def parsed(markup: bytes | str, path: str) -> Any:
    """Parse HTML or XML with Python's own parser, which fetches and runs nothing."""
    try:
        from bs4 import BeautifulSoup
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_EXTRA.format(path=path, name="beautifulsoup4")) from error
    return BeautifulSoup(markup, "html.parser")


def read_epub(path: str, encoding: str | None) -> str:
    """Return the text of an e-book's chapters, in their order of reading.

    Raises:
        ValueError: no EPUB, one that is damaged or has chapters that are encrypted, or one that is too large.
    """
    try:
        with ZipFile(path) as book:
            chapters = chapter_files(book, path)
            if sum(book.getinfo(name).file_size for name in chapters) > MOST_BYTES:
                raise ValueError(f"{path} holds more than {MOST_BYTES // 2**20} MiB of text: read it in parts.")
            return "\n\n".join(visible_text(book.read(name), path) for name in chapters)
    except (BadZipFile, KeyError, EOFError, NotImplementedError, RuntimeError, zlib.error, LZMAError) as error:
        raise ValueError(f"{path} is damaged, or no EPUB: {error}.") from error


def chapter_files(book: ZipFile, path: str) -> list[str]:
    """Return the names of a book's chapters, as its package file orders them."""
    root = parsed(book.read("META-INF/container.xml"), path).find("rootfile")
    if root is None:
        raise ValueError(f"{path} is damaged: it does not say where its chapters are.")
    package = parsed(book.read(root["full-path"]), path)
    folder = posixpath.dirname(root["full-path"])
    items = {item["id"]: item["href"] for item in package.find_all("item")}
    named = [items[chapter["idref"]] for chapter in package.find_all("itemref")]
    chapters = [posixpath.normpath(posixpath.join(folder, unquote(name))) for name in named]
    if "META-INF/encryption.xml" in book.namelist():  # it may list fonts alone
        secret = parsed(book.read("META-INF/encryption.xml"), path).find_all(re.compile("cipherreference"))
        if {unquote(reference["uri"]) for reference in secret} & set(chapters):
            raise ValueError(f"{path} is encrypted (copy protection): it can be read without that only.")
    return chapters


def read_pdf(path: str, encoding: str | None) -> str:
    """Return the text of a PDF, page by page.

    Raises:
        ValueError: it is encrypted, damaged, or holds pictures of text alone.
    """
    try:
        from pypdf import PdfReader
        from pypdf.errors import DependencyError
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(NO_EXTRA.format(path=path, name="pypdf")) from error
    locked = f"{path} is encrypted: save a copy without its password, and read that."
    try:
        reader = PdfReader(path)
        if reader.is_encrypted and not reader.decrypt(""):
            raise ValueError(locked)
        pages = [page.extract_text().strip() for page in reader.pages]
    except DependencyError as error:
        raise ValueError(locked) from error
    except Exception as error:  # pypdf raises whatever a damaged file leads to
        if str(error) == locked:
            raise
        raise ValueError(f"{path} is damaged, or no PDF: {error}.") from error
    if not any(pages):
        raise ValueError(
            f"{path} holds no text on its {len(pages)} pages: it may be a scan. Put its text in first, with a program "
            "for text recognition (OCR)."
        )
    return "\n\n".join(page for page in pages if page)


READERS: dict[str, Callable[[str, str | None], str]] = {
    ".html": read_html,
    ".htm": read_html,
    ".xhtml": read_html,
    ".epub": read_epub,
    ".pdf": read_pdf,
}
