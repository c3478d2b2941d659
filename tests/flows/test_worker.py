from pathlib import Path

import pytest

from flows.operate import worker
from tasks.system.errors import UserError


def test_a_schedule_that_prefect_yaml_says_to_be_active_is_not_kept_paused(project):
    """tests/flows/test_operation.py has what is kept paused, at a real server."""
    assert worker.said_active() == set(), "what it does not say is said on Prefect's page"
    path = Path("prefect.yaml")
    text = path.read_text()
    for said, found in (("true", {("nightly", "nightly")}), ("false", set())):
        path.write_text(text.replace("        slug: nightly\n", f"        slug: nightly\n        active: {said}\n"))
        assert worker.said_active() == found
    path.write_text("deployments: [\n")
    with pytest.raises(UserError, match=r"^prefect\.yaml cannot be read .*: restore it$"):
        worker.said_active()
