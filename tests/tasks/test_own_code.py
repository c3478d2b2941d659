from pathlib import Path

import pytest

from tasks import own_code

FILES = {
    "single.py": "import numpy, layers.dense\nraise RuntimeError('nothing is imported')\n",
    "layers/__init__.py": "",
    "layers/dense.py": "from . import shared\nfrom layers.inner import deep\n",
    "layers/shared.py": "",
    "layers/inner/__init__.py": "",
    "layers/inner/deep.py": "def late():\n    import late_one\n",
    "layers/unused.py": "",
    "late_one.py": "",
    "bare/model.py": "",
    "broken.py": "def\n",
}
IMPORTED = {name for name in FILES if name not in ("layers/unused.py", "bare/model.py", "broken.py")}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("single:build", IMPORTED),
        ("layers.dense:build", IMPORTED - {"single.py"}),
        ("bare.model:build", {"bare/model.py"}),
        ("broken:build", {"broken.py"}),
        ("convnet2", set()),
        ("json:build", set()),
        ("not_there:build", set()),
    ],
)
def test_the_files_that_a_model_of_the_users_needs(project: Path, model: str, expected: set[str]) -> None:
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    assert {path.as_posix() for path in own_code.files(model)} == expected
