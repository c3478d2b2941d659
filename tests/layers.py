"""The picture of the layers in docs/architecture.md, of pyproject.toml and the imports: `make picture`."""

import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
# What a layer is called, by one of its modules; the others have no frame.
TITLES = {"train": "stages", "tracking": "machinery", "runs": "parts"}
# This layer and those below it are there for every module: arrows to them would hide all others.
GROUND = "records"


def picture() -> str:
    """Return the modules by layer as Mermaid, with an arrow to each module that is imported, see ``arrows``."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    written = next(contract["layers"] for contract in linter["contracts"] if contract.get("containers") == ["tasks"])
    layers = [["flows"], *(re.findall(r"\w+", layer) for layer in written)]
    first = next(number for number, layer in enumerate(layers) if GROUND in layer)
    ground = [module for layer in layers[first:] for module in layer]
    lines = ["flowchart TD"]
    for layer in layers[:first]:
        title = next((TITLES[module] for module in layer if module in TITLES), None)
        lines += [f"subgraph {title}", *(f"  {module}" for module in layer), "end"] if title else layer
    lines += [f"ground[every module may import: {', '.join(ground)}]", f"{layers[first - 1][-1]} ~~~ ground"]
    return "\n".join([*lines, *(f"{above} --> {below}" for above, below in arrows(set(ground)))]) + "\n"


def arrows(ground: set[str]) -> list[tuple[str, str]]:
    """Return each module with each that it imports, unless another module that it imports leads there too."""
    graph = grimp.build_graph("flows", "tasks", cache_dir=None)
    below: dict[str, set[str]] = {}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            module, other = (name.removeprefix("tasks.").partition(".")[0] for name in (importer, imported))
            if module != other and not {module, other} & ground:
                below.setdefault(module, set()).add(other)

    def reached(module: str) -> set[str]:
        return below.get(module, set()).union(*(reached(lower) for lower in below.get(module, ())))

    pairs = (
        (module, lower) for module, direct in below.items() for lower in direct - set().union(*map(reached, direct))
    )
    return sorted(pairs)


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: f"```mermaid\n{picture()}```\n", page, count=1), encoding="utf-8")
