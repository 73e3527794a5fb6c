"""The command line: one function for each command.

This file imports nothing heavy before a command runs, so that help appears at once. For the same reason the console
script finds it in a package of its own, `cacheformers_cli` (setup.cfg): `cacheformers` itself imports torch.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

DESCRIPTION = """Read a book once into a memory file, then ask it as often as you like.

  cacheformers read BOOK.txt -o book.memory --adapter ADAPTER
  cacheformers ask book.memory "Who tells this story?"
  cacheformers ask book.memory                                    # a conversation, on the terminal
  cacheformers serve ADAPTER --memory book.memory                 # for OpenAI's clients and transformers chat
  cacheformers inspect book.memory

ADAPTER is a folder or Hub id of a memory adapter, as train_adapt.py writes it; it knows its base model. A memory file
is a folder. It belongs to the adapter and the base model that read it, remembers their names, and is refused by others.
"""
READ = """Read a text of any length and save what the model remembers of it.

The text is read in segments: the time grows with its length, the memory in use does not. After every --checkpoint
segments the memory is saved: if the command is stopped, give it again, and it continues from there. A memory of entries
keeps the newest --cache-size tokens and forgets older ones; the command says so, and which --cache-size keeps all.

  cacheformers read BOOK.txt -o book.memory --adapter ADAPTER                   # the adapter names its base model
  cacheformers read BOOK.txt -o book.memory --model BASE --adapter ADAPTER      # another copy of the base model
  cacheformers read BOOKS.jsonl.gz --document 7 -o book.memory --adapter ADAPTER --cache-size 131072
  cacheformers read BOOK.txt --encoding latin-1 -o book.memory --adapter ADAPTER
  cacheformers read BOOK.pdf -o book.memory --adapter ADAPTER                   # also .epub, .html; extra `documents`
"""
ASK = """Answer questions from a memory file.

The text is not read again. The model that read it is loaded by the name it had then. Without a question it holds a
conversation: questions are typed, and each follows on the ones before (where text is shown, each is asked by itself).
Questions that are given all start from the memory as it was saved. If the method retrieves (Neurocache, Memorizing
Transformer, CacheFormer, retrieval heads), the passages that the question and the answer retrieved most are printed
below the answer. Attention does not see a memory of retrieval heads: it answers by the passages that it recalls.

  cacheformers ask book.memory "Who tells this story?"
  cacheformers ask book.memory                                                  # a conversation
  cacheformers ask book.memory "Who?" "When?" "Where?"                          # the memory is loaded once
  cacheformers ask book.memory "Who tells this story?" --json                   # one JSON object a line
  cacheformers ask book.memory "Who tells this story?" --explain                # every token of the answer
  cacheformers ask book.memory "Who?" --adapter ADAPTER                         # if the adapter's folder has moved

  cacheformers ask book.memory "Who tells this story?" --prompt recalled        # with the passages that it recalls

--explain lists every token of the answer with the passages that were retrieved when it was chosen (by CacheFormer, the
segments that were taken uncompressed), and draws a heat map: tokens from top to bottom, the book from left to right,
colored by how often a place was retrieved. Forgotten parts of the book are gray.
"""
SERVE = """Answer OpenAI's clients with a model whose every conversation starts from a memory.

This is transformers' own server (`transformers serve`) with a model of this package: an adapter, or a model with a
memory of its own, such as an exported one. A client sends all turns of its conversation each time, and nothing of one
conversation reaches another. `transformers chat` and the Python package `openai` are such clients. Passages that a
memory of retrieval heads recalls are put before the last question.

  cacheformers serve ADAPTER --memory book.memory
  transformers chat ADAPTER http://127.0.0.1:8000
  cacheformers serve MODEL --port 8080                                          # every conversation starts empty
"""
INSPECT = """Say what a memory file holds.

It names the text, the model that read it, the number and size of the entries, and checks every checksum. It does not
load a model.

  cacheformers inspect book.memory
"""


# The other commands: the module whose function of the same name runs them.
HERE = {
    "read": "cacheformers.cli.read",
    "ask": "cacheformers.cli.ask",
    "serve": "cacheformers.cli.serve",
    "inspect": "cacheformers.cli.inspection",
}
# Commands whose options and help are in a module of their own: what they do, and the module whose `main` does it.
ELSEWHERE = {
    "fetch": ("Fetch a small pretrained model and two memories for it, to try.", "cacheformers.cli.fetch"),
    "app": ("Read, ask and see what is retrieved, on a page in the browser.", "cacheformers.app.main"),
    "train": ("Adapt a pretrained model, or train one from scratch.", "cacheformers.train_adapt"),
    "longbench": ("Evaluate on LongBench, as the official code does.", "cacheformers.eval_longbench"),
    "compare": ("Put results of longbench or perplexity side by side.", "cacheformers.evaluation.compare"),
    "perplexity": ("Measure the perplexity of a model on texts.", "cacheformers.evaluation.text_perplexity"),
    "babilong": ("Hide facts in books and ask about them.", "cacheformers.evaluation.babilong.main"),
    "ruler": ("Ask for needles, variables and frequent words in long texts.", "cacheformers.evaluation.ruler.main"),
    "passkey": ("Hide a key in long texts and ask for it.", "cacheformers.evaluation.passkey.main"),
    "lm-eval": ("Run lm-eval's command line with memory models.", "cacheformers.evaluation.harness"),
    "gates": ("Draw the gates or the memory's shares of a model.", "cacheformers.evaluation.gates"),
    "heads": ("Find the attention heads of a base that find passages.", "cacheformers.evaluation.heads"),
    "segments": ("Show which segments a CacheFormer retrieves.", "cacheformers.evaluation.segments"),
    "library": ("Keep many memory files, and ask them together.", "cacheformers.cli.library"),
    "attach": ("Put a memory on a pretrained model without training it.", "cacheformers.training.attach"),
    "export": ("Turn an adapter and its base into one model folder.", "cacheformers.adapters.export"),
    "convert": ("Convert a checkpoint of the published Neurocache package.", "cacheformers.methods.neurocache.convert"),
    "results": ("Put results into a model card's metadata.", "cacheformers.hub.results"),
    "push": ("Push an adapter or a model to the Hub, with its card.", "cacheformers.cli.push"),
}
RECIPES = (
    "train",
    "attach",
    "longbench",
    "perplexity",
    "babilong",
    "ruler",
    "passkey",
    "heads",
)  # their parsers take both spellings of options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; errors that a user can fix end with one line on stderr and status 1, Ctrl-C with status 130."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in ELSEWHERE:
        run_elsewhere(given[0], given[1:])
        return
    options = questions_anywhere(make_parser(), dashed(given))
    try:
        getattr(import_module(HERE[options.command]), options.command)(options)
    except KeyboardInterrupt:
        print(f"\ncacheformers {options.command}: stopped.", options.when_stopped, file=sys.stderr)
        sys.exit(130)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"cacheformers {options.command}: {error}")


def questions_anywhere(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse arguments whose `questions` may also come after options, which argparse does not expect of a list."""
    options, rest = parser.parse_known_args(arguments)
    if hasattr(options, "questions") and not any(word.startswith("-") for word in rest):
        options.questions, rest = [*options.questions, *rest], []
    if rest:
        command = chosen_command(parser, options)
        near = difflib.get_close_matches(rest[0].partition("=")[0], command._option_string_actions, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        command.error(f"unrecognized arguments: {' '.join(rest)}.{hint}")
    return options


def chosen_command(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.ArgumentParser:
    """Return the parser of the command that was given, or the parser itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen: argparse.ArgumentParser = action.choices.get(getattr(options, action.dest), parser)
            return chosen
    return parser


def run_elsewhere(command: str, arguments: list[str]) -> None:
    """Run a command that parses its own options."""
    sys.argv[0] = f"cacheformers {command}"  # the name that usage and errors give
    module: Any = import_module(ELSEWHERE[command][1])
    try:
        if command == "lm-eval":
            sys.argv[1:] = arguments
            module.cli_evaluate()
        elif command == "compare":
            module.main(comparison(arguments))
        else:
            module.main(arguments if command in RECIPES else dashed(arguments))
    except KeyboardInterrupt:
        print(f"\ncacheformers {command}: stopped.", file=sys.stderr)
        sys.exit(130)


def comparison(arguments: Sequence[str]) -> list[str]:
    """Put what `compare` is given in an order that leaves results to `--compare`, wherever its options stand."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    parser.add_argument("--tasks", nargs="+")
    options, rest = parser.parse_known_args(arguments)
    given = [] if options.output is None else ["--output", options.output]
    given += ["--tasks", *options.tasks] if options.tasks else []
    return sorted(["--compare", *rest, *given], key=lambda argument: argument not in ("-h", "--help"))


def dashed(arguments: Sequence[str]) -> list[str]:
    """Spell options with dashes, so that `--cache_size 5` is `--cache-size 5`."""
    spelled = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        spelled.append(name.replace("_", "-") + equals + value if name.startswith("--") else argument)
    return spelled


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="cacheformers", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    installed = f"cacheformers {version('cacheformers')}"
    parser.add_argument("--version", action="version", version=installed, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", required=True, title="commands", metavar="COMMAND")

    def add(name: str, description: str, when_stopped: str = "") -> argparse.ArgumentParser:
        command = commands.add_parser(
            name,
            help=description.partition("\n")[0],
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(when_stopped=when_stopped)
        return command

    command = add("read", READ, "What was saved stays; give the same command again to continue from there.")
    command.add_argument("book", help=".txt, .md, .html, .epub or .pdf file, or JSON lines or parquet")
    command.add_argument("-o", "--output", type=Path, required=True, metavar="MEMORY", help="folder to write")
    add_model(command, "the adapter's own")
    command.add_argument("--document", type=int, help="which document of the file, from 0 (default: the longest)")
    text_field = "field of JSON lines or parquet that holds the text (default: text)"
    command.add_argument("--text-field", default="text", metavar="NAME", help=text_field)
    command.add_argument("--encoding", metavar="NAME", help="of a .txt, .md or .html file (default: utf-8)")
    size = "most entries a layer keeps (default: the adapter's)"
    command.add_argument("--cache-size", type=int, metavar="N", help=size)
    checkpoint = "save after every N segments; 0: at the end (default: 32)"
    command.add_argument("--checkpoint", type=int, default=32, metavar="N", help=checkpoint)
    command.add_argument("--overwrite", action="store_true", help="replace an existing MEMORY")

    command = add("ask", ASK)
    command.add_argument("memory", type=Path, metavar="MEMORY", help="folder that `cacheformers read` wrote")
    command.add_argument(
        "questions", nargs="*", metavar="QUESTION", help="one or several, each on its own; none: a conversation"
    )
    add_model(command, "the one that read")
    command.add_argument("--max-new-tokens", type=int, default=60, metavar="N", help="longest answer (default: 60)")
    add_prompt(command)
    command.add_argument("--explain", action="store_true", help="for each token of the answer, what was retrieved")
    command.add_argument(
        "--json", action="store_true", help="print one JSON object an answer, and nothing else on standard output"
    )
    command.add_argument(
        "--heat-map", type=Path, metavar="PNG", help="picture that --explain draws (default: MEMORY's name with .png)"
    )
    add_verify(command)

    command = add("serve", SERVE)
    command.add_argument("model", metavar="MODEL", help="folder or Hub id of an adapter or of a model with a memory")
    memory = "folder that `cacheformers read` wrote: every conversation starts from a copy (default: an empty memory)"
    command.add_argument("--memory", type=Path, metavar="FILE", help=memory)
    command.add_argument(
        "--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1, no other machine)"
    )
    command.add_argument("--port", type=int, default=8000, metavar="N", help="port to listen at (default: 8000)")
    add_device(command)
    add_verify(command)

    command = add("inspect", INSPECT)
    command.add_argument("memory", type=Path, metavar="MEMORY", help="folder that `cacheformers read` wrote")
    add_verify(command)
    for name, (text, _) in ELSEWHERE.items():
        commands.add_parser(name, help=text, add_help=False)
    return parser


def add_model(command: argparse.ArgumentParser, default: str) -> None:
    group = command.add_argument_group("model")
    group.add_argument("--adapter", help="folder or Hub id of the memory adapter")
    group.add_argument("--model", metavar="BASE", help=f"folder or Hub id of the base model (default: {default})")
    add_device(group)


def add_prompt(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--prompt",
        choices=("question", "tail", "cut", "retrieved", "recalled", "hybrid"),
        help="what self-attention sees: the question alone, or before it the text's end, its beginning and end, "
        "what BM25 finds, the passages that the memory itself finds nearest the question, or what both find "
        "(default: question; recalled where attention does not see the memory: retrieval heads)",
    )
    command.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="text that --prompt shows, in tokens (default: 896)"
    )


def add_device(group: argparse._ActionsContainer) -> None:
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
