"""``vllmops patches``: known vLLM defects and the state of their patches."""

from ...output import typer_app
from . import list_, show, verify

app = typer_app()


app.command("list", epilog="Example: vllmops patches list -t demo")(list_.list_)
app.command(epilog="Example: vllmops patches verify -t demo")(verify.verify)
app.command(epilog="Example: vllmops patches show mm-lru-stale-eviction")(show.show)
