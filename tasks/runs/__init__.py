"""The runs in mlruns/: which are at work (`holds`), and whose they are (`identity`); how the others ended (`outcome`);
which one a command takes up (`index`, `resume`); what killed processes left (`leftovers`); what is known of all without
reading them again (`catalogue`); and what Prefect was not told of (`unreported`)."""

from tasks.runs.catalogue import forget
from tasks.runs.holds import Hold, abandoned, describe, hold, hold_run, is_held, is_over, key_of, refuse_held
from tasks.runs.identity import boot_id, process_space, project_id
from tasks.runs.index import (
    begun,
    find,
    find_named,
    find_unfinished,
    finished,
    is_id,
    look_up,
    newest,
    next_number,
    open_ended,
    undelivered,
)
from tasks.runs.leftovers import remove_leftovers
from tasks.runs.outcome import (
    RESULTS,
    forget_results,
    left_by,
    load_evaluation,
    load_training,
    mark_nonfinite,
    nonfinite_steps,
    settle,
    status,
)
from tasks.runs.resume import (
    changes_without_result,
    differences,
    forget_what_changed,
    refuse_other_training,
    refuse_resume,
    why_not_taken_up,
)
from tasks.runs.unreported import keep_unreported, unreported
