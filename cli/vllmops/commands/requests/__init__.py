"""``vllmops requests``: list, show and end the requests that a server works on."""

from ...support.output import make_typer_app
from . import abort, list_, show

app = make_typer_app()


app.command("list", epilog="Example: vllmops requests list -t demo --stuck")(list_.list_requests)
app.command(epilog="Example: vllmops requests show chatcmpl-1f0c -t demo")(show.show)
app.command(epilog="Example: vllmops requests abort --stuck --dry-run")(abort.abort)
