"""``vllmops responses``: what the Responses API has stored."""

from __future__ import annotations

from vllmops.support import output

from .cancel import cancel
from .check_store import check_store
from .delete import delete
from .export import export
from .import_ import import_responses
from .list_ import list_responses
from .purge import purge
from .show import show
from .stats import stats

app = output.make_typer_app()


app.command("list", epilog="Example: vllmops responses list --status failed")(list_responses)
app.command(epilog="Example: vllmops responses show resp_1f2e --input")(show)
app.command(epilog="Example: vllmops responses stats --store sqlite:///a.db")(stats)
app.command(epilog="Example: vllmops responses cancel --all-running")(cancel)
app.command(epilog="Example: vllmops responses delete resp_1f2e resp_3d4c")(delete)
app.command(epilog="Example: vllmops responses purge --older-than 30d --dry-run")(purge)
app.command(epilog="Example: vllmops responses export -o responses.jsonl")(export)
app.command("import", epilog="Example: vllmops responses import a.jsonl -t demo")(import_responses)
app.command(epilog="Example: vllmops responses check-store postgresql://user@host/database")(
    check_store
)
