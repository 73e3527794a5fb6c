"""What is dropped on the page of `cacheformers app`, and asked."""

from pathlib import Path

FACT = "Every Sunday Boris paints a red window."
ATTACK = (
    """<script>document.title = "broken"</script><img src=x onerror="document.title='broken'"> ${1+1} {{value}} &amp;"""
)


def damage(files):
    """Change one bit of a memory's tensors; the file."""
    file = next(path for path in map(Path, files) if path.suffix == ".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file
