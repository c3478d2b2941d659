"""The diagram of the packages in docs/architecture.md, drawn from pyproject.toml and the imports: `make picture`."""

import re
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BLOCK = re.compile(r"```mermaid\n(.*?)```\n", re.DOTALL)
# Every package may import these two levels: arrows to them would hide all others.
GROUND = ("records", "system")


def picture() -> str:
    """Return the packages of tasks/ level by level as Mermaid, with their imports, see ``arrows``."""
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    written = next(contract["layers"] for contract in linter["contracts"] if contract.get("containers") == ["tasks"])
    levels = [["flows"], *(re.findall(r"\w+", level) for level in written)]
    ground = [name for level in levels for name in level if {*level} & {*GROUND}]
    lines = ["flowchart TD"]
    for number, level in enumerate(levels):
        if not {*level} & {*GROUND}:
            frame = [f'subgraph level{number}[" "]', *(f"  {name}" for name in level), "end"]
            lines += frame if len(level) > 1 else level
    lines.append(f"ground[every package may import {', '.join(ground)}]")
    lines += [f"{package} --> {' & '.join(imported)}" for package, imported in arrows(set(ground)).items()]
    return "\n".join(lines) + "\n"


def arrows(ground: set[str]) -> dict[str, list[str]]:
    """Return what each package imports, without what another of its imports leads to."""
    graph = grimp.build_graph("flows", "tasks", exclude_type_checking_imports=True, cache_dir=None)
    below: dict[str, set[str]] = {}
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            package, other = (name.removeprefix("tasks.").partition(".")[0] for name in (importer, imported))
            if package != other and not {package, other} & ground:
                below.setdefault(package, set()).add(other)

    def reached(package: str) -> set[str]:
        return below.get(package, set()).union(*(reached(lower) for lower in below.get(package, ())))

    kept = {package: sorted(direct - set().union(*map(reached, direct))) for package, direct in sorted(below.items())}
    return {package: imported for package, imported in kept.items() if imported}


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda _: f"```mermaid\n{picture()}```\n", page, count=1), encoding="utf-8")
