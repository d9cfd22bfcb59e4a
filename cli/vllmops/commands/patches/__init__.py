"""``vllmops patches``: known vLLM defects and the state of their patches."""

from ...support.output import make_typer_app
from . import list_, show, verify

app = make_typer_app()


app.command("list", epilog="Example: vllmops patches list -t demo")(list_.list_patches)
app.command(epilog="Example: vllmops patches verify -t demo")(verify.verify)
app.command(epilog="Example: vllmops patches show mm-lru-stale-eviction")(show.show)
