"""`cacheformers library`: many memory files in one folder, asked together."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from accelerate.utils import gather_object

from cacheformers.adapters.folders import own_base
from cacheformers.cli.ask import begin, chat, check, say
from cacheformers.cli.main import add_model, add_prompt, questions_anywhere
from cacheformers.cli.model import lasting_name, load_model
from cacheformers.common.library import Library, reader_of
from cacheformers.evaluation.loading import make_state
from cacheformers.modeling.files.index import MemoryFileError
from cacheformers.modeling.thinning import RULES

DESCRIPTION = """Keep memory files in a folder, and ask one, several or all of them.

  cacheformers library DIR                                             # list
  cacheformers library DIR add BOOK.txt REPORT.pdf --adapter ADAPTER   # read documents into memory files
  cacheformers library DIR ask "Who tells this story?"                 # all, searched together
  cacheformers library DIR ask "Who?" --in BOOK --in REPORT            # these
  cacheformers library DIR ask "Who?" --choose                         # the one in which the question retrieves most
  cacheformers library DIR ask "Who?" --prompt recalled                # with the passages that they find nearest
  cacheformers library DIR ask                                         # a conversation
  cacheformers library DIR compress BOOK --bytes 400K                  # fewer entries, in 8 bits
  cacheformers library DIR remove BOOK

A launcher's processes share the documents to add, for example one for each GPU:

  torchrun --nproc_per_node 2 -m cacheformers library DIR add *.txt --adapter ADAPTER

Memories are searched together if one model read them, and its method keeps an entry for each token and searches them
(Neurocache, Memorizing Transformer, retrieval heads). Memories of other methods are asked one by one.
"""
FILES = ".txt, .md, .html, .epub or .pdf, or of JSON lines or parquet the longest document"
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def main(arguments: list[str] | None = None) -> None:
    """Run one action; errors that a user can fix end with one line on stderr."""
    parser = make_parser()
    options = questions_anywhere(parser, sys.argv[1:] if arguments is None else arguments)
    try:
        ACTIONS[options.action or "list"](Library(options.folder), options)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all actions."""
    parser = argparse.ArgumentParser(
        prog="cacheformers library", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="folder of the library")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions (default: list)")
    actions.add_parser("list", help="name all memories, their texts and sizes")

    command = actions.add_parser("add", help="read documents into memory files")
    command.add_argument("documents", nargs="+", metavar="FILE", help=FILES)
    command.add_argument("--name", help="of the memory, for one document (default: the file's without its ending)")
    command.add_argument("--cache-size", type=int, metavar="N", help="most entries (default: the adapter's)")
    command.add_argument("--encoding", metavar="NAME", help="of .txt, .md and .html files (default: utf-8)")
    command.add_argument("--overwrite", action="store_true", help="replace memories of these names")
    add_model(command, "that of the memories there, or the adapter's own")

    command = actions.add_parser("remove", help="delete memories")
    command.add_argument("names", nargs="+", metavar="NAME")

    command = actions.add_parser("ask", help="ask one, several or all memories")
    command.add_argument("questions", nargs="*", metavar="QUESTION", help="each on its own; none: a conversation")
    command.add_argument(
        "--in", dest="names", action="append", default=[], metavar="NAME", help="ask this (repeatable)"
    )
    command.add_argument("--choose", action="store_true", help="ask the one in which the question retrieves most")
    command.add_argument("--max-new-tokens", type=int, default=60, metavar="N", help="(default: 60)")
    add_prompt(command)
    command.add_argument("--explain", action="store_true", help="for each token of the answer, what was retrieved")
    command.add_argument("--heat-map", type=Path, metavar="PNG", help="that --explain draws (default: DIR.png)")
    command.add_argument("--json", action="store_true", help="print one JSON object an answer")
    add_model(command, "the one that read")

    command = actions.add_parser("compress", help="thin a memory to a number of bytes")
    command.add_argument("name", metavar="NAME")
    command.add_argument(
        "--bytes", type=size, required=True, metavar="N", help="most bytes on disk, such as 400K or 2M"
    )
    command.add_argument("--rule", choices=RULES, default="oldest", help="which entries go (default: oldest)")
    command.add_argument("--question", dest="asked", action="append", default=[], metavar="QUESTION", help="for unused")
    command.add_argument("--no-int8", action="store_true", help="keep the precision of entries")
    add_model(command, "the one that read; only the rule unused needs it")
    return parser


def size(text: str) -> int:
    """Read a number of bytes, with K, M or G for binary multiples."""
    unit = UNITS.get(text[-1:].upper(), 1)
    number = float(text[:-1] if unit > 1 else text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of bytes.")
    return int(number * unit)


def list_memories(library: Library, options: argparse.Namespace) -> None:
    """Print a line for each memory; raise MemoryFileError, after that, if some are damaged."""
    damaged: list[str] = []
    if not library.names:
        print(f"{library.folder} holds no memory yet: add a document first.")
    for name in library.names:
        try:
            held = library.describe(name)
        except MemoryFileError as error:
            damaged.append(str(error))
        else:
            print(f"{held.name:<24} {held.tokens:>10,} tokens {held.bytes / 2**20:>8.2f} MiB  {held.source}")
    if damaged:
        raise MemoryFileError("\n".join(damaged))


def with_model(library: Library, options: argparse.Namespace, names: Sequence[str] = ()) -> Library:
    """Load the model that is named, or that read the memories of these names (default: all)."""
    base, adapter = options.model or "", options.adapter or ""
    if library.names and not adapter:
        reader = reader_of(library, names)
        base, adapter = base or reader.base, reader.adapter
    model, tokenizer = load_model(base, adapter, options.device, options.dtype)
    named = lasting_name(base or own_base(adapter))
    return Library(library.folder, model, tokenizer, named, lasting_name(adapter))


def add(library: Library, options: argparse.Namespace) -> None:
    """Read documents, in each of the processes that a launcher has started its share of them."""
    if options.name and len(options.documents) > 1:
        raise ValueError("--name is for one document: leave it out, or add the documents one by one.")
    names = [options.name or Path(path).stem for path in options.documents]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two documents would be called {twice[0]}: add one of them by itself, with --name.")
    if not options.overwrite:
        for name in names:
            library.check_new(name)
    state = make_state(options.device or "")
    library = with_model(library, options)
    state.wait_for_everyone()  # nobody writes before all have seen which model reads
    failures: list[str] = []
    for path in share(options.documents, state.process_index, state.num_processes):
        try:
            held = library.add(
                path,
                options.name or "",
                overwrite=options.overwrite,
                cache_size=options.cache_size,
                progress=state.is_main_process,
                encoding=options.encoding,
            )
            longest = "" if held.source == path else f" (the longest document of {path})"
            print(f"{held.name}: {held.tokens:,} tokens, {held.bytes / 2**20:.2f} MiB{longest}", flush=True)
        except (OSError, ValueError, ImportError) as error:
            failures.append(str(error))
    failures = gather_object(failures)
    state.destroy_process_group()
    if failures and state.is_main_process:
        raise ValueError("\n".join(failures))
    if failures:
        sys.exit(2)


def share(documents: list[str], process: int, processes: int) -> list[str]:
    """Return the documents that one of several processes reads; the largest files are dealt out first."""
    if processes == 1:
        return documents
    sizes = {path: Path(path).stat().st_size if Path(path).is_file() else 0 for path in documents}
    return sorted(documents, key=lambda path: -sizes[path])[process::processes]


def remove(library: Library, options: argparse.Namespace) -> None:
    """Delete memories."""
    for name in options.names:
        library.remove(name)
        print(f"{name} is removed.")


def ask(library: Library, options: argparse.Namespace) -> None:
    """Answer every question on its own, or hold a conversation."""
    check(options)
    if options.choose and not options.questions:
        raise ValueError("--choose is for a question that is given: a conversation stays with its memories.")
    library = with_model(library, options, library.check(options.names))
    assert library.model is not None and library.tokenizer is not None
    options.memory = options.heat_map or library.folder
    if not options.questions:
        chat(begin(library.model, library.tokenizer, library.memories(options.names), options), options)
        return
    for number, question in enumerate(options.questions):
        names = [library.choose(question, options.names)] if options.choose else options.names
        conversation = begin(library.model, library.tokenizer, library.memories(names), options)
        if not options.json:
            print(f"\nQ: {question}" + (f" ({names[0]})" if options.choose else ""), end="\nA: ", flush=True)
        say(conversation, question, options, number)


def compress(library: Library, options: argparse.Namespace) -> None:
    """Thin a memory."""
    before = library.describe(options.name) if options.name in library.names else None
    if options.asked and options.rule == "unused":
        library = with_model(library, options, [options.name])
    held = library.compress(options.name, options.bytes, options.rule, not options.no_int8, options.asked)
    assert before is not None
    was, now = (f"{each.tokens:,} entries, {each.bytes:,} bytes" for each in (before, held))
    print(f"{held.name}: {was}; now {now}")


ACTIONS = {"list": list_memories, "add": add, "remove": remove, "ask": ask, "compress": compress}
