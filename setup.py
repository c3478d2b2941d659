"""How a wheel is laid out; all else is in pyproject.toml.

A wheel has one top-level package, `stratagem`: stratagem.py is its __init__, and flows/, tasks/ and what a new project
is made of lie in it. An editable install leads to the checkout as it is.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

BROUGHT = ("params.yaml", "dvc.yaml", "prefect.yaml", "requirements.lock")
MAIN = '"""`python -m stratagem`: the command."""\n\nfrom stratagem import main\n\nmain()\n'


class BuildPackage(build_py):
    """Puts all into one package."""

    def run(self) -> None:
        """Build the package anew: what an earlier build left would be part of the wheel."""
        if self.editable_mode:
            super().run()
            return
        shutil.rmtree(self.build_lib, ignore_errors=True)
        package = Path(self.build_lib) / "stratagem"
        self.build_lib = str(package)
        super().run()
        (package / "stratagem.py").rename(package / "__init__.py")
        (package / "__main__.py").write_text(MAIN, encoding="utf-8")
        for name in BROUGHT:
            shutil.copyfile(name, package / name)
        shutil.copytree("recipes", package / "recipes")


setup(cmdclass={"build_py": BuildPackage})
