"""`stratagem init`: a new project."""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command import Debug, Json, command


def init(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A new folder; or one without files of these names.")],
    git: Annotated[
        bool | None,
        typer.Option("--git/--no-git", help="Make a git repository there. Without either, where it is in none."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be made; nothing is.")] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Make a new project: params.yaml, recipes, the dataset digits, what DVC and Prefect need.

    The code is no part of it, and stays where it is installed.
    """
    with command(debug):
        from shlex import quote

        from tasks.operations import new_project
        from tasks.system.errors import UserError

        if not folder:  # A variable of a shell that is not set: as a path it would be the current folder.
            raise UserError("FOLDER is empty: name the folder of the new project; . is this one")
        made = new_project.make(Path(folder), git, dry_run)
        if json:
            print(made.model_dump_json())
            return
        if dry_run:
            print(f"would make {made.folder}" + (", a git repository, with" if made.git else " with"))
            print("\n".join(made.files))
            return
        print(f"made {made.folder}: {len(made.files)} files" + (", and a git repository" if made.git else ""))
        print(f"next: cd {quote(folder)} && stratagem run")
        if made.git:
            print("      git add --all && git commit -m 'The project', so that runs name a commit")
