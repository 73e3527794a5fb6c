"""What the tests of the recipes share: tiny documents, the arguments of a tiny run, and runs as real processes.

Processes are forked from a server that has imported everything once, so that each starts in a fraction of a second.
"""

import importlib.util
import json
import multiprocessing
import os
import socket
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

WORDS = 125  # with <pad>, <bos>, <eos> the 128 ids of the tiny models
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 60  # seconds that a tiny run may take on a busy machine


def script(path):
    """A script of the repository, such as recipes/make_babi.py, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look it up there
    spec.loader.exec_module(module)
    return module


def make_text(length, seed=0):
    """`length` words, one token each."""
    numbers = torch.randint(0, WORDS, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return " ".join(f"w{number}" for number in numbers)


def write_documents(path, *lengths):
    lines = [json.dumps({"title": path.stem, "text": make_text(length, length)}) for length in lengths]
    path.write_text("\n".join(lines) + "\n")


def arguments(folder, *more, output="adapter"):
    """A run over the documents and the base of the fixture `folder`."""
    options = {
        "base": folder / "base",
        "train": folder / "train.jsonl",
        "output": folder / output,
        "segment_tokens": 16,
        "cache_size": 40,
        "topk": 4,
        "retrieval_map": 1,
        "r": 4,
        "steps": 5,
        "lanes": 2,
    }
    return [*(f"--{key}={value}" for key, value in options.items()), *more]


def adapter_weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def largest_difference(one, other):
    """Between the weights of two adapter folders."""
    first, second = adapter_weights(one), adapter_weights(other)
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


class Recipe:
    """A recipe in processes of its own.

    Args:
        arguments: of the command line.
        log: file for what the processes write to stdout and stderr.
        processes: how many share the run, as torchrun would start them.
        before: Python lines that process `rank` (a variable there) runs first.
        recipe: `train_adapt` or `eval_longbench`.
    """

    def __init__(self, arguments, log, processes=1, before="", recipe="train_adapt"):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cacheformers.train_adapt", "torch.distributed.fsdp", "cacheformers.adapters"])
        self.logs = [log.with_suffix(f".{rank}") for rank in range(processes)]
        port = free_port()
        self.processes = []
        for rank in range(processes):
            environment = {} if processes == 1 else {**launched(rank, processes, port)}
            code = "\n".join(
                [
                    "import os, sys",
                    f"os.environ.update({environment!r})",
                    f"os.environ['HF_DATASETS_CACHE'] = {os.environ['HF_DATASETS_CACHE']!r}",
                    f"os.chdir({str(log.parent)!r})",
                    f"rank, log = {rank}, os.open({str(self.logs[rank])!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)",
                    "os.dup2(log, 1), os.dup2(log, 2)",
                    f"import faulthandler; faulthandler.dump_traceback_later({PATIENCE - 20})  # where it hangs",
                    before,
                    "import torch, datasets",
                    "torch.set_num_threads(1)",
                    "datasets.config.HF_DATASETS_CACHE = os.environ['HF_DATASETS_CACHE']",
                    f"from cacheformers.{recipe} import main",
                    f"main({arguments!r})",
                ]
            )
            process = context.Process(target=exec, args=(code, {}))
            process.start()
            self.processes.append(process)

    def wait(self):
        """The exit codes; -9 for a process that was killed."""
        for process in self.processes:
            process.join(PATIENCE)
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()

    def output(self, rank=0):
        return self.logs[rank].read_text() if self.logs[rank].exists() else ""


def launched(rank, processes, port):
    """The variables that torchrun sets."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def free_port():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def run(arguments, log, processes=1, before="", recipe="train_adapt"):
    """A run that must succeed."""
    started = Recipe(arguments, log, processes, before, recipe)
    codes = started.wait()
    assert codes == [0] * processes, "\n".join(started.output(rank) for rank in range(processes))
    return started
