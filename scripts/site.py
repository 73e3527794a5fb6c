"""What `make docs` adds to docs/: a page for each memory method and notebook, and the repository's files they link to.

mkdocs calls the functions `on_...` while it builds (mkdocs.yml, `hooks`). A page of a method is made from what the
method says of itself: the docstring of its module (equations), its descriptor, and the help of its settings. What a
person has to say of it, docs/methods/NAME.md, goes in between, and need not exist.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from dataclasses import fields
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import cacheformers  # noqa: F401  # registers the methods
from cacheformers.modeling.method import METHODS, MemoryMethod

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
OUTSIDE = "repository"  # the folder of the site for files that are not in docs/
OWN = {
    f"methods/{method.name}.md": method
    for method in METHODS.values()
    if method.adapter_config.__module__.startswith("cacheformers.")
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the methods into the navigation."""
    for section in config.nav or []:
        if isinstance(section, dict) and "Methods" in section:
            section["Methods"] = list(OWN)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages of notebooks, of methods that nobody wrote about, and files outside docs/ that pages link to."""
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        files.append(File.generated(config, f"{notebook.stem}.md", content=notebook_page(notebook)))
    for name, method in OWN.items():
        if name not in files.src_uris:
            files.append(File.generated(config, name, content=f"# {method.title}\n"))
    waiting = [(file.src_uri, f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        page, place, text = waiting.pop()
        for target in targets(place, text):
            name = site_name(target)
            if name not in files.src_uris and (ROOT / target).is_file():
                content = (ROOT / target).read_text(encoding="utf-8")
                if target.endswith(".md"):
                    waiting.append((name, target, content))
                    content = relinked(content, target, name)
                files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links at the files of the site, and complete the page of a method."""
    name = page.file.src_uri
    if not name.startswith(f"{OUTSIDE}/"):
        markdown = relinked(markdown, f"docs/{name}", name)
    if name in OWN:
        return method_page(OWN[name], markdown)
    return completed(markdown)


def completed(markdown: str) -> str:
    """Put in what all methods say of themselves: their table, and their entries in the reference."""
    made = {"table of methods": methods_table, "adapters": adapters, "model classes": model_classes}
    for name, make in made.items():
        markdown = markdown.replace(f"<!-- {name} -->", make())
    return markdown


def targets(place: str, text: str) -> list[str]:
    """The files of the repository, by their paths, that the page at `place` links to."""
    return [normpath(join(dirname(place), found[3])) for found in LINK.finditer(text)]


def site_name(path: str) -> str:
    """Where the site has a file of the repository; of a notebook, its page."""
    path = re.sub(r"^(docs/.*)\.ipynb$", r"\1.md", path)
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{OUTSIDE}/{path}"


def relinked(text: str, place: str, page: str) -> str:
    """Point links that leave docs/ at copies in the site; a link to a folder becomes its text."""

    def link(found: re.Match[str]) -> str:
        path = normpath(join(dirname(place), found[3]))
        if path.startswith("docs/") and place.startswith("docs/") and not path.endswith(".ipynb"):
            return found[0]
        if (ROOT / path).is_dir():
            return found[2]
        return f"{found[1]}[{found[2]}]({relpath(site_name(path), dirname(page) or '.')}{found[4] or ''})"

    return LINK.sub(link, text)


def notebook_page(path: Path) -> str:
    """A notebook as a page: its text, and its code, of which lines after `!` are the shell's."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            text = f"```bash\n{text[1:]}\n```" if text.startswith("!") else f"```python\n{text}\n```"
        parts.append(text)
    return "\n\n".join(
        [*parts, f'<a href="{path.name}" download>This page as a notebook</a>, which the tests execute.']
    )


def methods_table() -> str:
    """All methods: when to choose which, and what it costs."""
    rows = [
        f"| [{method.title}]({page}) | {method.choose_when} | {method.grows} | {method.starts_as} |\n"
        for page, method in OWN.items()
    ]
    return "| method | choose it when | grows with what was read | starts as |\n|---|---|---|---|\n" + "".join(rows)


def adapters() -> str:
    """The adapter configurations of all methods, for the reference."""
    return "\n\n".join(reference(method.adapter_config) for method in OWN.values())


def model_classes() -> str:
    """The configurations and model classes of all methods, for the reference."""
    return "\n\n".join(
        reference(known) for method in OWN.values() for known in (method.config, method.causal_lm, method.model)
    )


def reference(known: type[Any]) -> str:
    """An entry of the reference with a class's docstring alone."""
    return f"::: cacheformers.{known.__name__}\n    options:\n      members: false\n      show_signature: false"


def method_page(method: MemoryMethod, written: str) -> str:
    """The page of a method: equations, growth, what was written by hand, options, trained parts, limits, citation."""
    module = sys.modules[method.parts.__module__]
    title, _, by_hand = written.strip().partition("\n")
    settings = {entry.name: entry for entry in fields(method.adapter_config) if "help" in entry.metadata}
    summary, retrieves = (
        re.sub(r"\{(\w+)[^}]*\}", lambda found: f"{settings[found[1]].default}", text)
        for text in (method.summary, method.retrieves or "nothing")
    )
    options = [
        f"| `{name}` | `{entry.default!r}` | {cell(entry.metadata['help'])} |\n" for name, entry in settings.items()
    ]
    adapter, model = method.adapter_config.__name__, method.causal_lm.__name__
    parts = [
        title,
        f"{summary} Paper: {method.paper}.",
        f"| | |\n|---|---|\n| choose it when | {method.choose_when} |\n| grows with what was read | {method.grows} |\n"
        f"| starts as | {method.starts_as} |\n| a token retrieves, in each layer | {retrieves} |\n"
        f"| adapter | `cacheformers.{adapter}` |\n"
        f"| model class | `cacheformers.{model}` |\n| recipe option | `--method {method.name}` |\n",
        by_hand.strip(),
        f"## Equations\n\n{inspect.cleandoc(module.__doc__ or '')}",
        f"The code: `{module.__name__.replace('.', '/').removeprefix('cacheformers/')}.py`.",
        f"## Options\n\nFields of `{adapter}` beside those of PEFT's `LoraConfig`, of the model's configuration, and "
        f"options of `cacheformers train --method {method.name}`.\n\n"
        f"| option | default | |\n|---|---|---|\n{''.join(options)}",
        f"## What is trained beside LoRA\n\n{inspect.cleandoc(method.parts.__doc__ or '')}",
        "## Limits\n\n" + "\n".join(f"- {limit}" for limit in method.limits),
        f"## Citation\n\n```bibtex\n{method.citation.strip()}\n```" if method.citation else "",
    ]
    return "\n\n".join(part for part in parts if part)


def cell(text: Any) -> str:
    """Text for a cell of a table."""
    return str(text).replace("|", "\\|").replace("\n", " ")
