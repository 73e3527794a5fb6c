"""LongBench on real records: runs that are killed or shared by processes end with the same files; `full` is `generate`.

    python benchmarks/longbench.py runs --data ../shared/data/longbench_mini --limit 2 --max_length 1024
    python benchmarks/longbench.py full --data ../shared/data/longbench_mini

`runs`: one process; two processes; one that is killed by SIGKILL three times, at moments of its own choice, and started
again each time. All predictions must be the same, byte for byte. `full`: answers of the runner in batches of two, which
are padded on the left, against `generate` of the same prompts alone: uncut, in float32, token for token.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from measuring import parser, save
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from cacheformers.evaluation.longbench.answers import answer, generation_config
from cacheformers.evaluation.longbench.methods import PromptMaker, make_method
from cacheformers.evaluation.longbench.options import LongBenchOptions
from cacheformers.evaluation.longbench.records import load_records
from cacheformers.evaluation.longbench.tasks import TASKS
from cacheformers.evaluation.longbench.templates import load_templates

CHOSEN = ("lcc", "multi_news", "qasper", "samsum", "multifieldqa_en")  # tasks with prompts of some thousand tokens


def main() -> int:
    """Check, print, write; 1 if something differs."""
    given = parser(__doc__, "longbench")
    given.add_argument("check", choices=["runs", "full"])
    given.add_argument("--base", default="data/smollm2-135m-instruct")
    given.add_argument("--data", default="../shared/data/longbench_mini", help="LongBench's records")
    given.add_argument("--limit", type=int, default=2, help="records of each task")
    given.add_argument("--max_length", type=int, default=1024, help="runs: prompts are cut to N tokens")
    given.add_argument("--at_least", type=int, default=1500, help="full: prompts have at least N tokens")
    given.add_argument("--scratch", type=Path, default=Path("runs/longbench_check"), help="runs: made anew")
    options = given.parse_args()
    found = check_runs(options) if options.check == "runs" else check_full(options)
    print(found)
    save(f"check_{options.check}", options, found)
    return 0 if found["same"] else 1


def check_runs(options: argparse.Namespace) -> dict[str, Any]:
    """Compare predictions of one process, of two, and of one that is killed three times."""
    if options.scratch.exists():
        shutil.rmtree(options.scratch)
    started = time.monotonic()
    evaluate(options, "one")
    seconds = time.monotonic() - started
    evaluate(options, "two", processes=2)
    kills: list[int] = []
    moments = random.Random(0)
    while len(kills) < 3:
        killed = evaluate(options, "killed", kill_after=seconds * moments.uniform(0.15, 0.3))
        if not killed:
            raise RuntimeError("The run ended before it was killed: give it more records.")
        kills.append(sum(len(text.splitlines()) for text in predictions(options.scratch / "killed").values()))
    evaluate(options, "killed")
    files = {name: predictions(options.scratch / name) for name in ("one", "two", "killed")}
    return {
        "same": files["one"] == files["two"] == files["killed"],
        "tasks": len(files["one"]),
        "records": sum(len(text.splitlines()) for text in files["one"].values()),
        "records_at_each_kill": kills,
        "seconds_of_one_process": round(seconds),
    }


def evaluate(options: argparse.Namespace, name: str, processes: int = 1, kill_after: float | None = None) -> bool:
    """Run the recipe, and return whether it was killed."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    command += ["eval_longbench.py", f"--base={options.base}", f"--data={options.data}", "--chat", "--batch=4"]
    command += [f"--limit={options.limit}", f"--max_length={options.max_length}", "--dtype=bfloat16", "--no_plots"]
    command += ["--methods", "truncation", f"--output={options.scratch / name}"]
    try:
        subprocess.run(command, check=True, timeout=kill_after, stdout=subprocess.DEVNULL)  # kills by SIGKILL
    except subprocess.TimeoutExpired:
        return True
    return False


def predictions(folder: Path) -> dict[str, str]:
    """Return the text of every file of predictions."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "pred").glob("*/*.jsonl"))}


@torch.no_grad()
def check_full(options: argparse.Namespace) -> dict[str, Any]:
    """Compare ten records, two of a task together, with each of them alone."""
    tokenizer = AutoTokenizer.from_pretrained(options.base)
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32).eval()
    settings = LongBenchOptions(data=options.data, methods=["full"], chat=True)
    method = make_method("full", settings, options.base, model.config, None)
    maker = PromptMaker(method, settings, tokenizer, load_templates(TASKS))
    rows = []
    for name in tqdm(CHOSEN, unit="task"):
        prompts = sorted((maker(record) for record in load_records(options.data, name)), key=lambda one: len(one.ids))
        pair = [prompt for prompt in prompts if len(prompt.ids) >= options.at_least][:2]
        together = answer(model, tokenizer, pair, TASKS[name], remembers=False)
        config = generation_config(model, tokenizer, TASKS[name])
        for found, prompt in zip(together, pair, strict=True):
            ids = torch.tensor([prompt.ids])
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
            alone = plain[0, len(prompt.ids) :].tolist()
            rows.append({"task": name, "prompt": len(prompt.ids), "answer": len(alone), "same": found == alone})
    return {"same": all(row["same"] for row in rows), "records": rows}


if __name__ == "__main__":
    sys.exit(main())
