"""The picture of the house in docs/architecture.md, of the layers in pyproject.toml and the imports: `make picture`."""

import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
# What a layer is called, by one of its rooms; the others have no frame.
TITLES = {"train": "stages", "training": "machinery", "runs": "kinds"}
# This layer and those below it are there for every room: arrows to them would hide all others.
GROUND = "records"


def picture() -> str:
    """Return the rooms by layer as Mermaid, with an arrow to each room that is imported, see ``arrows``."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    written = next(contract["layers"] for contract in linter["contracts"] if contract.get("containers") == ["tasks"])
    layers = [["flows"], *(re.findall(r"\w+", layer) for layer in written)]
    first = next(number for number, layer in enumerate(layers) if GROUND in layer)
    ground = [room for layer in layers[first:] for room in layer]
    lines = ["flowchart TD"]
    for layer in layers[:first]:
        title = next((TITLES[room] for room in layer if room in TITLES), None)
        lines += [f"subgraph {title}", *(f"  {room}" for room in layer), "end"] if title else layer
    lines += [f"ground[every room may import: {', '.join(ground)}]", f"{layers[first - 1][-1]} ~~~ ground"]
    return "\n".join([*lines, *(f"{above} --> {below}" for above, below in arrows(set(ground)))]) + "\n"


def arrows(ground: set[str]) -> list[tuple[str, str]]:
    """Return each room with each that it imports, unless another room that it imports leads there too."""
    graph = grimp.build_graph("flows", "tasks", cache_dir=None)
    below: dict[str, set[str]] = {}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            room, other = (name.removeprefix("tasks.").partition(".")[0] for name in (module, imported))
            if room != other and not {room, other} & ground:
                below.setdefault(room, set()).add(other)

    def reached(room: str) -> set[str]:
        return below.get(room, set()).union(*(reached(lower) for lower in below.get(room, ())))

    return sorted((room, lower) for room in below for lower in below[room] - set().union(*map(reached, below[room])))


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: f"```mermaid\n{picture()}```\n", page, count=1), encoding="utf-8")
