"""``vllmops conversations``: what the Conversations API has stored."""

from __future__ import annotations

from vllmops.support import output

from .delete import delete
from .export import export
from .import_ import import_conversations
from .list_ import list_conversations
from .purge import purge
from .show import show

app = output.make_typer_app()

app.command("list", epilog="Example: vllmops conversations list -t demo")(list_conversations)
app.command(epilog="Example: vllmops conversations show conv_1f2e -t demo")(show)
app.command(epilog="Example: vllmops conversations delete conv_1f2e conv_3d4c")(delete)
app.command(epilog="Example: vllmops conversations purge --older-than 30d -t demo")(purge)
app.command(epilog="Example: vllmops conversations export -o conversations.jsonl")(export)
app.command(
    "import", epilog="Example: vllmops conversations import a.jsonl --store redis://host:6379/0"
)(import_conversations)
