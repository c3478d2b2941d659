"""The runs in mlruns/: which are at work (`locks`), and whose they are (`identity`); how the others ended (`outcome`);
which one a command resumes (`index`, `resume`, `comparisons`); what killed processes left (`leftovers`); what is known
of all without reading them again (`catalogue`); how they look in a list (`listing`) and by themselves (`details`);
which of them need no room on the disk any more (`pruning`); and what Prefect was not told of (`unreported`)."""

from tasks.runs.comparisons import find_unfinished_comparison, load_progress, save_progress
from tasks.runs.details import compare, show
from tasks.runs.identity import boot_id, process_space, project_id, store_name
from tasks.runs.index import (
    children,
    find,
    find_named,
    find_not_final,
    find_unfinished,
    finished,
    is_id,
    kind_of_parent,
    look_up,
    look_up_parent,
    newest,
    next_number,
    resolve,
    sweeps,
    undelivered,
)
from tasks.runs.leftovers import remove_leftovers
from tasks.runs.listing import FIGURES, RunFilter, list_runs, lower_is_better, moment
from tasks.runs.locks import (
    RunLock,
    at_work_on,
    crashed_holders,
    describe,
    is_abandoned,
    is_locked,
    key_of,
    lock,
    lock_run,
    refuse_locked,
)
from tasks.runs.outcome import (
    forget_results,
    load_evaluation,
    load_limits,
    load_result,
    load_training,
    mark_nonfinite,
    nonfinite_steps,
    refuse_pruned,
    save_limits,
    save_result,
    set_status,
    status,
)
from tasks.runs.pruning import Selection, prune
from tasks.runs.resume import (
    changes_without_result,
    differences,
    forget_what_changed,
    refuse_other_training,
    refuse_resume,
    what_changed,
    why_not_resumed,
)
from tasks.runs.unreported import keep_unreported, unreported
