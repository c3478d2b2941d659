"""What each strategy offers, and why it does not offer the rest."""

from tasks import config
from tasks.reports.tables import markdown_table


def offers() -> dict[str, dict[str, str | None]]:
    """Return what each strategy offers, by feature and kind: None when it does, else the reason why not."""
    kinds = config.strategy_kinds()
    loops = dict.fromkeys(loop for section in kinds.values() for loop in section.loops)
    table = {
        f"train.loop={loop}": {
            kind: None if loop in section.loops else f"its only loop is {' and '.join(section.loops)}"
            for kind, section in kinds.items()
        }
        for loop in loops
    }
    for feature in dict.fromkeys(["train.steps_per_execution", *config.FEATURES]):
        table[feature] = {kind: section.refuses.get(feature) for kind, section in kinds.items()}
    return table


def offers_cells() -> tuple[list[list[str]], dict[str, str]]:
    """Return a row a feature (its name, then a cell a strategy), and the reasons by the number in a cell."""
    reasons: dict[str, int] = {}
    rows = []
    for feature, by_kind in offers().items():
        marks = [
            "yes" if reason is None else f"no ({reasons.setdefault(reason, len(reasons) + 1)})"
            for reason in by_kind.values()
        ]
        rows.append([feature, *marks])
    return rows, {f"({number})": reason for reason, number in reasons.items()}


def offers_page() -> str:
    """Return what each strategy offers in Markdown, as docs/strategies.md shows it."""
    rows, reasons = offers_cells()
    kinds = config.strategy_kinds()
    header = ["", *(f"`{kind}`" for kind in kinds)]
    backends = ["Keras backend", *(section.backend for section in kinds.values())]
    rows = [[f"`{feature}`", *marks] for feature, *marks in rows]
    lines = [*markdown_table(header, [backends, *rows], num_texts=len(header)), ""]
    lines += [f"- {number} {reason}" for number, reason in reasons.items()]
    return "\n".join(lines) + "\n"
