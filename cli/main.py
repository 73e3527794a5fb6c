"""The command line: one function a command, and help that teaches.

This file imports nothing heavy before a command runs, so that help appears at once. The console script takes it from a
package of its own, `cacheformers_cli` (setup.cfg): to import `cacheformers` is to import torch, transformers and PEFT.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

DESCRIPTION = """Read a book once into a memory file, then ask it as often as you like.

  cacheformers read BOOK.txt -o book.memory --adapter ADAPTER
  cacheformers ask book.memory "Who tells this story?"
  cacheformers ask book.memory "Who tells this story?" --explain
  cacheformers inspect book.memory

ADAPTER is a folder or Hub id of a memory adapter, as train_adapt.py writes it; it knows its base model. A memory file
is a folder. It belongs to the adapter and the base model that read it, remembers their names, and is refused by others.
"""
READ = """Read a text of any length and save what the model remembers of it.

The text goes by in segments: time grows with it, the working memory does not. Every --checkpoint segments what is new
is saved: if the command is stopped, give it again, and it goes on from there. A memory of entries keeps the newest
--cache-size tokens and forgets those before them; the command says so, and which --cache-size keeps all.

  cacheformers read BOOK.txt -o book.memory --adapter ADAPTER                   # the adapter names its base model
  cacheformers read BOOK.txt -o book.memory --model BASE --adapter ADAPTER      # another copy of the base model
  cacheformers read BOOKS.jsonl.gz --document 7 -o book.memory --adapter ADAPTER --cache-size 131072
  cacheformers read BOOK.txt --encoding latin-1 -o book.memory --adapter ADAPTER
"""
ASK = """Answer questions from a memory file.

The text is not read again. The model that read it is loaded by the name it had then. Every question starts from the
memory as it was saved. After the answer come the passages that it and the question retrieved most, if the method
retrieves (Neurocache, Memorizing Transformer).

  cacheformers ask book.memory "Who tells this story?"
  cacheformers ask book.memory "Who?" "When?" "Where?"                          # the memory is loaded once
  cacheformers ask book.memory "Who tells this story?" --explain                # every token of the answer
  cacheformers ask book.memory "Who?" --adapter ADAPTER                         # if the adapter's folder has moved

With --explain every token of the answer is listed with the passages that were retrieved when it was
chosen, and a picture shows all of it: tokens from top to bottom, the book from left to right, the color how often.
What the memory has forgotten of the book is gray.
"""
INSPECT = """Say what a memory file holds.

Which text, read by which model, how many entries of which size, and whether every checksum is right. No model is
loaded.

  cacheformers inspect book.memory
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; what a user can put right ends with one line on stderr and status 1, Ctrl-C with status 130."""
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
    except KeyboardInterrupt:
        print(f"\ncacheformers {options.command}: stopped.", options.when_stopped, file=sys.stderr)
        sys.exit(130)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"cacheformers {options.command}: {error}")


def read(options: argparse.Namespace) -> None:
    from cacheformers.cli.read import read

    read(options)


def ask(options: argparse.Namespace) -> None:
    from cacheformers.cli.ask import ask

    ask(options)


def inspect(options: argparse.Namespace) -> None:
    from cacheformers.cli.inspection import inspect

    inspect(options)


class ShowVersion(argparse.Action):
    """Print the version of the installed package, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"cacheformers {version('cacheformers')}")
        parser.exit()


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands; `run` of what it returns is the command's function."""
    parser = argparse.ArgumentParser(
        prog="cacheformers", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, title="commands", metavar="{read,ask,inspect}")

    def add(name: str, run: object, description: str, when_stopped: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run, when_stopped=when_stopped)
        return command

    command = add("read", read, READ, "What was saved stays; give the same command again to go on from there.")
    command.add_argument("book", help=".txt or .md file, or JSON lines or parquet")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="MEMORY", help="folder to write")
    add_model(command, "the adapter's own")
    command.add_argument("--document", type=int, help="which document of the file, from 0 (default: the longest)")
    command.add_argument(
        "--text-field",
        default="text",
        metavar="NAME",
        help="field of JSON lines or parquet that holds the text (default: text)",
    )
    # As train_adapt.py and errors about fields spell it.
    command.add_argument("--text_field", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    command.add_argument("--encoding", metavar="NAME", help="of a .txt or .md file (default: utf-8)")
    command.add_argument(
        "--cache-size", type=int, metavar="N", help="most entries a layer keeps (default: the adapter's)"
    )
    command.add_argument(
        "--checkpoint",
        type=int,
        default=32,
        metavar="N",
        help="save after every N segments; 0: at the end (default: 32)",
    )
    command.add_argument("--overwrite", action="store_true", help="begin anew where MEMORY is there already")

    command = add("ask", ask, ASK)
    command.add_argument("memory", type=Path, metavar="MEMORY", help="folder that `cacheformers read` wrote")
    command.add_argument("questions", nargs="+", metavar="QUESTION", help="one or several, each on its own")
    add_model(command, "the one that read")
    command.add_argument("--max-new-tokens", type=int, default=60, metavar="N", help="longest answer (default: 60)")
    command.add_argument("--explain", action="store_true", help="for each token of the answer, what was retrieved")
    command.add_argument(
        "--heat-map", type=Path, metavar="PNG", help="picture that --explain draws (default: MEMORY's name with .png)"
    )
    add_verify(command)

    command = add("inspect", inspect, INSPECT)
    command.add_argument("memory", type=Path, metavar="MEMORY", help="folder that `cacheformers read` wrote")
    add_verify(command)
    return parser


def add_model(command: argparse.ArgumentParser, default: str) -> None:
    group = command.add_argument_group("model")
    group.add_argument("--adapter", help="folder or Hub id of the memory adapter")
    group.add_argument("--model", metavar="BASE", help=f"folder or Hub id of the base model (default: {default})")
    group.add_argument("--device", help="cpu, cuda, ... (default: a GPU if there is one)")
    group.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16", "float64"),
        help="of the base model (default: as it is stored)",
    )


def add_verify(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--no-verify", action="store_true", help="do not compare checksums: faster for a large memory on a slow disk"
    )
