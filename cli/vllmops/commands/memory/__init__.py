"""``vllmops memory``: record the memory of a server's processes, and judge whether it grows."""

from ...support.output import make_typer_app
from . import record, report

app = make_typer_app()


app.command(epilog="Example: vllmops memory record -t demo --rounds 5 --load images")(record.record)
app.command(epilog="Example: vllmops memory report memory.jsonl --plot memory.svg")(report.report)
