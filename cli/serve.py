"""`cacheformers serve`: answer OpenAI's clients with a model whose every conversation starts from a memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import PreTrainedTokenizerFast
from transformers.utils.import_utils import is_serve_available

import cacheformers
from cacheformers.adapters.folders import not_found
from cacheformers.cli.inspection import kept
from cacheformers.cli.model import load_model


def serve(options: argparse.Namespace) -> None:
    """Load model and memory once, then answer requests until the command is stopped."""
    if not is_serve_available():
        raise ModuleNotFoundError(
            'Serving takes fastapi, uvicorn, pydantic and openai. Run: pip install "cacheformers[serve]"'
        )
    import uvicorn

    from cacheformers.cli.server import FromMemory, give_chat_template, make_app
    from cacheformers.evaluation.showing import PassageConversation

    model, tokenizer = load_model(*base_and_adapter(options.model), options.device, options.dtype, option="")
    start, passages = "an empty memory.", None
    if options.memory is not None:
        memory = cacheformers.load_memory(options.memory, model, not options.no_verify, tokenizer)
        if memory.batch_size != 1:
            raise ValueError(f"{options.memory} holds {memory.batch_size} documents; a server takes a memory of one.")
        if not memory.state.attends:
            passages = PassageConversation(model, tokenizer, memory).passages
        start, model = f"{options.memory}: {kept(memory)}", FromMemory(model, memory)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(f"The tokenizer of {options.model} is written in Python: the server takes fast ones.")
    give_chat_template(tokenizer)
    print(f"Every conversation starts from {start}")
    print(f"Model {options.model} at http://{options.host}:{options.port}/v1", flush=True)
    uvicorn.run(make_app(options.model, model, tokenizer, passages), host=options.host, port=options.port)


def base_and_adapter(model: str) -> tuple[str, str]:
    """Return a folder or Hub id of a model as `(model, "")`, that of an adapter as `("", adapter)`."""
    folder = Path(model)
    is_model = (folder / "config.json").is_file() if folder.is_dir() else not_found(model, "adapter_config.json")
    return (model, "") if is_model else ("", model)
