"""params.yaml and the recipes."""

from collections.abc import Iterator

from tasks import config
from tasks.operations.doctor import Here, Remark
from tasks.system.errors import UserError


def look(here: Here) -> Iterator[Remark]:
    """Yield which of them cannot be read, with the first key that is wrong."""
    known = config.recipes(here.root)
    wrong = 0
    for recipe in (None, *known):
        try:
            config.load(recipe, root=here.root)
        except UserError as error:
            wrong += 1
            place = "params.yaml" if recipe is None else known[recipe].relative_to(here.root)
            yield Remark("error", f"{place}: {str(error).removeprefix(f'{here.root}/{place}: ')}", f"edit {place}")
            if recipe is None:  # All recipes lie over it, and would say the same.
                return
    if not wrong:
        yield Remark("ok", f"params.yaml and {len(known)} recipes")
