"""`stratagem compare`: parses, calls, prints."""

from typing import Annotated

import typer

from flows.cli import completion
from flows.cli.command import NO_SETTINGS, Debug, Json, Recipe, command
from flows.cli.explanation import Explain, show

Strategies = Annotated[
    str,
    typer.Option(
        "--strategies",
        metavar="A,B,...",
        help="Which: `stratagem strategies`.",
        autocompletion=completion.strategy_lists,
    ),
]
Loops = Annotated[
    str,
    typer.Option(
        "--loops",
        metavar="A,B",
        help="Which loops; a pair that does not exist is left out.",
        autocompletion=completion.loop_lists,
    ),
]
SetForAll = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="One setting for all, such as train.epochs=3; strategy.devices=2 goes to each strategy that has "
        "devices, strategy.mirrored.devices=2 to one.",
        autocompletion=completion.settings,
    ),
]
Repeats = Annotated[
    int | None,
    typer.Option(
        "--repeats",
        min=1,
        metavar="N",
        help="How often each is trained, in rounds. Without it twice; once where a round takes over 10 minutes.",
    ),
]


def compare(
    strategies: Strategies,
    recipe: Recipe = None,
    loops: Loops = "fit,custom",
    overrides: SetForAll = NO_SETTINGS,
    repeats: Repeats = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew, also where the same one is unfinished.")] = False,
    explain: Explain = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the same under several strategies, one after another, in rounds: how fast, how good, and why.

    The table says where a step's time goes, and what follows from the figures; comparison.html has it with plots. A
    comparison that was killed goes on with the trainings that are missing.

    Data, seed, epochs and the global batch are those of the settings for all; a batch size for each replica counts as
    the global one. A strategy that fails is a row with its reason.
    """
    with command(debug):
        from flows.cli import tables
        from flows.operate import notifications, prefect_server
        from flows.plan import plan
        from tasks import config
        from tasks.operations import dvc_data, explanation, preconditions
        from tasks.process import client

        notifications.check()
        kinds, wanted, values = strategies.split(","), loops.split(","), config.read_overrides(overrides)
        planned = plan(kinds, wanted, recipe, values)
        if explain:
            show(explanation.comparison(planned.rows, planned.key, recipe, values), json)
            return
        first = planned.trainable[0]
        preconditions.check_writable()
        preconditions.check_remote(first)
        dvc_data.check_source(first.dataset)
        with prefect_server.starting(first, debug, with_cluster=False):
            from flows.comparison import comparison
            from flows.reporting import run_flow

        compared = run_flow(comparison, kinds, wanted, recipe, values, repeats, fresh)
        client.stop_processes()
        if json:
            print(compared.model_dump_json())
        else:
            tables.print_comparison(compared)
