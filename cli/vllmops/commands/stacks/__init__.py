"""``vllmops stacks``: dump the stacks of a server, and explain them."""

from ...support.output import make_typer_app
from . import dump, explain

app = make_typer_app()


app.command(epilog="Example: vllmops stacks dump -t demo --save stuck.json")(dump.dump)
app.command(epilog="Example: vllmops stacks explain stuck.json")(explain.explain)
