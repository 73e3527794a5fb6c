"""What runs of BABILong and RULER leave behind, and that they go on after a kill."""

import json

from longbench_cases import KILLED
from recipe import Recipe, run


def predictions(folder, output="out", title="base-full"):
    return {file.name: file.read_text() for file in sorted((folder / output / "pred" / title).glob("*.jsonl"))}


def result(folder, output="out", title="base-full"):
    return json.loads((folder / output / title / "result.json").read_text())


def times(folder):
    return (folder / "out" / "pred" / "base-full" / "times.ndjson").read_text()


def check_killed_and_resumed(folder, main, arguments, recipe):
    """A run that is killed, and goes on in two processes, ends like one that was not.

    `arguments` makes those of a run from the folder and more of them; `recipe` is the module to run.
    """
    main(arguments(folder, f"--output={folder / 'whole'}"))
    before = KILLED.format(rank=0, moment=6, half=True)  # times, answers, times, ...
    killed = Recipe(arguments(folder), folder / "killed.log", 1, before, recipe)
    assert killed.wait() == [-9], killed.output()
    first = times(folder).splitlines()[:2]
    resumed = run(arguments(folder), folder / "resumed.log", 2, recipe=recipe)
    assert times(folder).splitlines()[:2] == first
    assert predictions(folder) == predictions(folder, "whole")
    assert result(folder)["accuracy"] == result(folder, "whole")["accuracy"]
    assert result(folder)["environment"]["processes"] == 2
    assert "| task |" in resumed.output(0) and "| task |" not in resumed.output(1)
