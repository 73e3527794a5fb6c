"""Run a checkpoint of 7B through the commands of a user on a CPU, and write down the time and peak memory of each.

    python benchmarks/seven_b.py --layout llama-2-7b                    # an hour on one core, 28 GB of disk, 16 GiB
    python benchmarks/seven_b.py --layout mistral-7b --steps 2 --read 512
    python benchmarks/seven_b.py --layout llama-2-7b --layers 2 --output data/small     # minutes

Weights are random (`random_checkpoint.py`): they make no difference to time or memory, and answers mean nothing. The
text is the documentation of this repository, and the tokenizer is learned from it, with fewer entries than the model's
vocabulary. A stage that is written down already is not run again, so that the same command goes on after a stop.
Results: seven_b.json and seven_b.md, of all layouts together.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from measuring import about, opening, parser, table
from models import BASE_CONFIGS

ROOT = Path(__file__).resolve().parents[1]
STAGES = {
    "import": "imports alone",
    "base": "write random weights",
    "estimate": "`--estimate`",
    "train": "load, one step, checkpoint, stop",
    "resume": "load, `--resume`, {more} more, save",
    "malloc": "load, one step, checkpoint, stop, with `MALLOC_MMAP_THRESHOLD_=65536`",
    "read": "read {read:,} tokens (adapter's folder through AutoModel), save the memory",
    "ask": "generate {new} tokens from the memory file (base, then PeftModel)",
    "longbench": "`longbench --limit 1`, base and adapter, a context of {context:,} tokens",
    "export": "export, LoRA merged, in shards of 5 GB",
    "exported": "load the export, read {again:,} tokens",
    "base_nf4": "write random weights in 4 bits",
    "estimate_nf4": "`--estimate` in 4 bits",
    "from_nf4": "load weights that are in 4 bits, one step, save",
    "nf4": "load in 4 bits, one step, save",
}
ESTIMATES = ("estimate", "estimate_nf4")
AGAIN, CONTEXT, NEW = 512, 1500, 8
SAID = "## What it says"


def main() -> None:
    """Run what has not been run, and write the page."""
    given = parser(__doc__, "")
    given.add_argument("--layout", required=True, choices=sorted(path.name for path in BASE_CONFIGS.iterdir()))
    given.add_argument("--layers", type=int, help="only so many layers, to try the stages")
    given.add_argument(
        "--stages", nargs="+", choices=STAGES, default=list(STAGES), metavar="STAGE", help=" ".join(STAGES)
    )
    given.add_argument("--folder", type=Path, default=Path("data/seven_b"), help="for weights (default: %(default)s)")
    given.add_argument("--dtype", default="bfloat16", help="of the base in all stages (default: %(default)s)")
    given.add_argument("--segment", type=int, default=256, help="tokens of a segment (default: %(default)s)")
    given.add_argument("--steps", type=int, default=3, help="of the training (default: %(default)s)")
    given.add_argument("--read", type=int, default=4096, help="tokens that are read (default: %(default)s)")
    given.add_argument("--redo", action="store_true", help="run the stages again")
    given.add_argument("--delete", action="store_true", help="delete the folder of weights at the end")
    options = given.parse_args()

    name = options.layout + (f", {options.layers} layers" if options.layers else "")
    folder = options.folder / name.replace(", ", "-").replace(" ", "-")
    path = options.output / "seven_b.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = results.setdefault(name, {})
    for stage in options.stages:
        if stage in found and not options.redo:
            continue
        print(f"{name}: {stage}", flush=True)
        found[stage] = run(stage, folder, options)
        print(found[stage], flush=True)
        found["settings"] = {key: getattr(options, key) for key in ("dtype", "segment", "steps", "read")}
        found["settings"]["about"] = about()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results) + "\n", encoding="utf-8")
        write_page(path.with_suffix(".md"), results)
    if options.delete:
        shutil.rmtree(folder)


def run(stage: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run one stage in a process of its own, after what it needs has been put there."""
    if not (folder / "book.txt").exists():
        write_texts(folder, options)
    written = {name: name for name in ("malloc", "nf4", "from_nf4")}
    written |= {"train": "adapter", "read": "memory", "export": "exported", "exported": "memory_exported"}
    if stage in written:
        shutil.rmtree(folder / written[stage], ignore_errors=True)
    environment = {"MALLOC_MMAP_THRESHOLD_": "65536"} if stage == "malloc" else {}
    found = measured(command(stage, folder, options), folder / f"{stage}.log", environment)
    found["threads"] = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
    if stage in ("base", "base_nf4"):
        shutil.copytree(folder / "tokenizer", folder / stage, dirs_exist_ok=True)
        found["weights_gib"] = sum(file.stat().st_size for file in (folder / stage).glob("*.safetensors")) / 2**30
    if stage in ESTIMATES:
        log = (folder / f"{stage}.log").read_text(encoding="utf-8")
        found["estimate_gib"] = float(re.findall(r"Peak: ([0-9.]+) GiB", log)[0])
        found["most_gib"] = float(re.findall(r"Up to ([0-9.]+) GiB", log)[0])
    return found


def command(stage: str, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return what a user would type, `cacheformers` being the module."""
    base, adapter, memory, exported = (str(folder / name) for name in ("base", "adapter", "memory", "exported"))
    kind = ["--dtype", options.dtype, "--device", "cpu"]
    train = ["train", "--train", str(folder / "train.jsonl"), *kind]
    train += ["--method", "neurocache", "--segment_tokens", str(options.segment), "--log_every", "1"]
    steps = ["--steps", str(options.steps), "--base", base]
    four_bits = ["--steps", "1", "--quantize", "nf4", "--output", str(folder / stage)]
    given = {
        "estimate": [*train, *steps, "--output", adapter, "--estimate"],
        "train": [*train, *steps, "--output", adapter, "--stop_after", "0.001"],
        "malloc": [*train, *steps, "--output", str(folder / "malloc"), "--stop_after", "0.001"],
        "resume": [*train, *steps, "--output", adapter, "--resume"],
        "read": ["read", str(folder / "book.txt"), "-o", memory, "--adapter", adapter, *kind],
        "ask": ["ask", memory, "What is a segment?", "--model", base, "--adapter", adapter, *kind],
        "longbench": ["longbench", "--base", base, "--adapter", adapter, "--data", str(folder / "longbench"), *kind],
        "export": ["export", adapter, exported, "--max-shard-size", "5GB", "--dtype", options.dtype],
        "exported": ["read", str(folder / "page.txt"), "-o", f"{memory}_exported", "--model", exported, *kind],
        "estimate_nf4": [*train, *four_bits, "--base", base, "--estimate"],
        "from_nf4": [*train, *four_bits, "--base", f"{base}_nf4"],
        "nf4": [*train, *four_bits, "--base", base],
    }
    if stage == "import":
        return [sys.executable, "-c", "import cacheformers.train_adapt"]
    if stage in ("base", "base_nf4"):
        write = [sys.executable, str(ROOT / "benchmarks/random_checkpoint.py"), options.layout, str(folder / stage)]
        write += ["--layers", str(options.layers)] if options.layers else []
        return [*write, "--quantize", "nf4"] if stage == "base_nf4" else write
    ends = {"ask": ["--max-new-tokens", str(NEW)], "longbench": ["--limit", "1", "--methods", "memory", "--overwrite"]}
    ends["longbench"] += ["--tasks", "hotpotqa", "--output", str(folder / "longbench_result"), "--plots=false"]
    return [sys.executable, "-m", "cacheformers", *given[stage], *ends.get(stage, [])]


def measured(arguments: list[str], log: Path, more: dict[str, str]) -> dict[str, Any]:
    """Run a command; return its seconds, its largest resident sets, of all and of what is no file's, and the load."""
    start, anonymous, loads = time.perf_counter(), 0, []
    environment = {**os.environ, **more, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        done = 0
        while not done:
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
            if not done:
                anonymous = max(anonymous, anonymous_bytes(process.pid))
                loads.append(os.getloadavg()[0])
                time.sleep(0.1)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(arguments)} failed ({process.returncode}):\n{log.read_text(encoding='utf-8')[-3000:]}")
    seconds = time.perf_counter() - start
    peak = usage.ru_maxrss * 1024 / 2**30
    found = {"seconds": seconds, "peak_gib": peak, "anonymous_gib": anonymous / 2**30, "load": mean(loads)}
    return {name: round(value, 2) for name, value in found.items()}


def anonymous_bytes(process: int) -> int:
    """Return the resident bytes of a process that are no file's; 0 if it has ended."""
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    line = re.search(r"^RssAnon:\s+(\d+)", status, re.MULTILINE)
    return 1024 * int(line[1]) if line else 0


def write_texts(folder: Path, options: argparse.Namespace) -> None:
    """Write a tokenizer, documents to train on, a text to read, a shorter one, and a record of LongBench."""
    from cacheformers.training.tokenizer import train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    pages = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md"))]
    tokenizer = train_tokenizer(pages, 4096)
    tokenizer.save_pretrained(folder / "tokenizer")
    whole = "\n\n".join(pages)
    ends = [end for _, end in tokenizer(whole, return_offsets_mapping=True).offset_mapping]
    cut = {name: whole[: ends[count - 1]] for name, count in (("book", options.read), ("page", again(options.read)))}
    for name, text in cut.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": whole[start:]}) for start in range(0, len(whole) // 2, len(whole) // 8)]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    record = {
        "input": "What is a segment?",
        "context": whole[: ends[CONTEXT]],
        "answers": ["the unit after which a memory closes"],
        "length": CONTEXT,
        "dataset": "hotpotqa",
        "language": "en",
        "all_classes": None,
        "_id": "0",
    }
    (folder / "longbench").mkdir(exist_ok=True)
    (folder / "longbench/hotpotqa.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")


def again(read: int) -> int:
    """Return how many tokens the exported model reads: at most half of what the adapter has read."""
    return min(AGAIN, read // 2)


def write_page(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the page; what people have written below its last heading stays."""
    _, heading, said = (path.read_text(encoding="utf-8") if path.exists() else "").partition(SAID)
    path.write_text(page(results) + (f"\n{heading}{said}" if heading else ""), encoding="utf-8")


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the Markdown page of all layouts."""
    first = next(iter(results.values()))["settings"]
    lines = opening(
        "A checkpoint of 7B through the commands, on a CPU",
        first,
        "Weights are random, in the exact layout of the model named, so answers mean nothing; time and memory do not "
        "depend on their values. Every line is a process of its own. Peak memory is the largest resident set; "
        "`own` is what is no file's (weights that are mapped from their files are not copied). The estimate is of a "
        "training step, without what the imports take. `load` is the machine's load average, on two cores.",
    )
    for name, found in results.items():
        settings = found["settings"]
        lines += [f"## {name}", ""]
        weights = found.get("base", {}).get("weights_gib")
        size = f"Weights: {weights:.2f} GiB. " if weights else ""
        lines += [
            f"{size}{settings['dtype']}, segments of {settings['segment']} tokens; "
            f"commit {settings['about']['commit']}, transformers {settings['about']['transformers']}.",
            "",
        ]
        rows = []
        for stage, title in STAGES.items():
            if stage in found:
                row = found[stage]
                more = "one step" if settings["steps"] == 2 else f"{settings['steps'] - 1} steps"
                told = title.format(
                    read=settings["read"], again=again(settings["read"]), context=CONTEXT, new=NEW, more=more
                )
                if "estimate_gib" in row:
                    told += f": **{row['estimate_gib']:.2f} GiB**"
                    told += f", with what malloc may keep {row['most_gib']:.2f}" if "most_gib" in row else ""
                sizes = f"{row['peak_gib']:.2f}", f"{row['anonymous_gib']:.2f}"
                load = f"{row['load']:.1f}" if "load" in row else "-"
                rows.append([told, str(row["threads"]), load, f"{row['seconds']:,.0f}", *sizes])
        lines += table(["stage", "threads", "load", "seconds", "peak GiB", "own GiB"], rows)
    return "\n".join(lines)


if __name__ == "__main__":
    main()
