"""Writers of predictions by format: JSON lines, CSV, Parquet, and an HTML page of images."""

import base64
import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from tasks.system import units

Columns = Mapping[str, Sequence[Any]]
Pictures = npt.NDArray[np.uint8] | None
"""The images of the examples with a prediction, uint8 (n, height, width, channels); None for other inputs."""
MAX_PICTURES = 1000
"""The maximum on a page, so that a browser can open it."""
SIDE = 96
"""The size of an image on the page, in pixels."""


class PredictionWriter:
    """Writes predictions to a binary file, some examples at a time."""

    def __init__(self, file: IO[bytes], names: Sequence[str]) -> None:
        self.file, self.names = file, names

    def write(self, columns: Columns, pictures: Pictures) -> None:
        """Write some examples in their order."""
        raise NotImplementedError

    def rows(self, columns: Columns) -> Iterator[tuple[Any, ...]]:
        """Return the values of each example, in the order of the columns' names."""
        return zip(*(columns[name] for name in self.names), strict=True)

    def write_text(self, text: str) -> None:
        """Write a text as UTF-8, with escapes for characters that UTF-8 cannot encode."""
        self.file.write(text.encode("utf-8", "backslashreplace"))

    def finish(self) -> None:
        """Write what follows the last example."""
        self.file.flush()


class JsonLines(PredictionWriter):
    """One JSON object per line."""

    def write(self, columns: Columns, pictures: Pictures) -> None:
        lines = (json.dumps(dict(zip(self.names, row, strict=True)), ensure_ascii=False) for row in self.rows(columns))
        self.write_text("".join(f"{line}\n" for line in lines))
        self.file.flush()


class Csv(PredictionWriter):
    """A header, and one line per example."""

    def __init__(self, file: IO[bytes], names: Sequence[str]) -> None:
        super().__init__(file, names)
        self.write({name: [name] for name in names}, None)

    def write(self, columns: Columns, pictures: Pictures) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(self.rows(columns))
        self.write_text(text.getvalue())
        self.file.flush()


class Parquet(PredictionWriter):
    """One row per example, in row groups of ``GROUP`` rows or more."""

    GROUP = 65_536

    def __init__(self, file: IO[bytes], names: Sequence[str]) -> None:
        super().__init__(file, names)
        import pyarrow as pa
        import pyarrow.parquet

        self._kept: dict[str, list[Any]] = {name: [] for name in names}
        # A regression has numbers as predictions and is the only task without probabilities.
        told = ("prediction",) if any(name.startswith("probability") for name in names) else ()
        texts = ("source", "error", *told)
        types = {name: "string" if name.startswith(texts) else "float64" for name in names} | {"row": "int64"}
        self._schema = pa.schema(list(types.items()))
        self._pa = pa
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema)

    def write(self, columns: Columns, pictures: Pictures) -> None:
        for name, kept in self._kept.items():
            kept += columns[name]
        if len(self._kept["error"]) >= self.GROUP:
            self._write()

    def _write(self) -> None:
        self._writer.write_table(self._pa.table(self._kept, schema=self._schema))
        self._kept = {name: [] for name in self.names}

    def finish(self) -> None:
        if self._kept["error"]:
            self._write()
        self._writer.close()


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>Predictions</title>
<style>
:root {{ color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }}
body {{ margin: 1rem; display: grid; grid-template-columns: repeat(auto-fill, minmax({width}px, 1fr)); gap: .75rem; }}
figure {{ margin: 0; overflow-wrap: anywhere; }}
img, div {{ display: block; width: {side}px; height: {side}px; background: #8882; }}
img {{ object-fit: contain; image-rendering: pixelated; }}
div {{ display: grid; place-items: center; color: #b00; font-size: 2rem; }}
small {{ color: #777; }} .error {{ color: #b00; }} p {{ grid-column: 1 / -1; margin: 0; }}
</style>
"""


class Sheet(PredictionWriter):
    """An HTML page with the images as the model sees them and their predictions; it needs no network and no script."""

    def __init__(self, file: IO[bytes], names: Sequence[str]) -> None:
        super().__init__(file, names)
        self._count = 0
        self.write_text(PAGE.format(side=SIDE, width=SIDE + 48))

    def write(self, columns: Columns, pictures: Pictures) -> None:
        whole = iter(pictures if pictures is not None else ())
        for row in self.rows(columns):
            told = dict(zip(self.names, row, strict=True))
            picture = None if told["error"] else next(whole, None)
            self._count += 1
            if self._count <= MAX_PICTURES:
                self.write_text(_figure(told, picture))

    def finish(self) -> None:
        if self._count > MAX_PICTURES:
            self.write_text(f"<p>The first {MAX_PICTURES:,} of {self._count:,}.</p>\n")
        self.write_text("</html>\n")


def _figure(told: Mapping[str, Any], picture: npt.NDArray[np.uint8] | None) -> str:
    place = str(told["source"]) + (f", row {told['row']}" if told["row"] is not None else "")
    if told["error"]:
        why = f'<span class="error">{escape(told["error"])}</span> <br><small>{escape(place)}</small>'
        return f"<figure><div>?</div>{why}</figure>\n"
    image = "<div></div>" if picture is None else f'<img alt="" src="{_png(picture)}">'
    said = []
    for name, value in told.items():
        if name.startswith("prediction"):
            of = f"{escape(name.partition(':')[2])} " if ":" in name else ""
            word = units.number(value, 4) if isinstance(value, float) else str(value)
            said.append(f"{of}<b>{escape(word)}</b>")
        elif name.startswith("probability") and ":" not in name:
            said[-1] += f" {value:.4f}"
    return f"<figure>{image}{'<br>'.join(said)}<br><small>{escape(place)}</small></figure>\n"


def _png(picture: npt.NDArray[np.uint8]) -> str:
    from PIL import Image

    image = Image.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture)
    image.thumbnail((2 * SIDE, 2 * SIDE))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


WRITERS: dict[str, type[PredictionWriter]] = {"jsonl": JsonLines, "csv": Csv, "parquet": Parquet, "html": Sheet}
