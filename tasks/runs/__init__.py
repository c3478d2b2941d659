"""The runs in mlruns/: which there are (`entries`), which are at work, whose they are and what killed
processes left (`locks`), how they ended and what their stages left (`outcome`), which one a command
resumes (`entries`, `resume`), how they look in a list and by themselves (`listing`), and which need no room
on the disk any more (`pruning`). Where a run comes from (`lineage`, `uncommitted`), and its copy elsewhere (`remote`).
"""

from tasks.runs.entries import (
    children,
    find_named,
    find_not_final,
    find_run,
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
from tasks.runs.listing import FIGURES, RunFilter, compare, list_runs, lower_is_better, moment, show
from tasks.runs.locks import (
    RunLock,
    at_work_on,
    boot_id,
    crashed_holders,
    describe,
    is_abandoned,
    is_locked,
    key_of,
    key_of_asked,
    lock,
    lock_run,
    process_space,
    project_id,
    refuse_locked,
    remove_leftovers,
    store_name,
)
from tasks.runs.outcome import (
    forget_results,
    keep_unreported,
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
    unreported,
)
from tasks.runs.pruning import Selection, prune
from tasks.runs.resume import (
    changes_without_result,
    differences,
    find_unfinished_comparison,
    forget_what_changed,
    load_progress,
    refuse_other_training,
    refuse_resume,
    save_progress,
    what_changed,
    why_not_resumed,
)
